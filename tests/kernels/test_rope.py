"""Norms, rope and the write into the arena, in one launch, against compositions of the torch references."""

import pytest
import torch
from tolerance import DEVICE, assert_all_rounded_alike, gaussian, in_slots, poisoned, slot_table

from redraft.config import LayerConfig
from redraft.kernels.rope import inverse_frequencies, qkv_norm_rope, qkv_norm_rope_reference

EPS = 1e-6


def run(qkv, q_weight, k_weight, inv_freq, length, *, heads, kv_heads, count, rows_cap, room):
    """The launch into poisoned outputs: q, and the arena's keys and values, by lane."""
    batch, dim = length.shape[0], 2 * inv_freq.shape[0]
    q = poisoned(batch, heads, count, dim, dtype=qkv.dtype)
    arena = [poisoned(batch + 1, kv_heads, rows_cap + room, dim, dtype=qkv.dtype) for _ in range(2)]
    qkv_norm_rope(
        qkv, q_weight, k_weight, inv_freq, in_slots(length), slot_table(batch), EPS,
        q_out=q, keys=arena[0], values=arena[1], rows_cap=rows_cap,
    )  # fmt: skip
    for tensor in arena:
        assert tensor[0].isnan().all(), "a slot without a lane was touched"
        assert tensor[:, :, :rows_cap].isnan().all(), "the prefix was touched"
        assert tensor[:, :, rows_cap + count :].isnan().all(), "rows past the pass were touched"
    return q, *(tensor[1:, :, rows_cap : rows_cap + count].flip(0) for tensor in arena)


def inputs(batch, count, heads, kv_heads, dim, *, has_v, dtype):
    width = (heads + (2 if has_v else 1) * kv_heads) * dim
    return gaussian(batch * count, width, dtype=dtype, scale=4), *(gaussian(dim, dtype=dtype) for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layer", "heads", "has_v", "lengths", "count"),
    [
        (LayerConfig("sliding", 8, 2, 1e4, 1.0), 4, True, [0], 1),
        (LayerConfig("sliding", 64, 2, 1e4, 1.0), 4, True, [5, 1023, 7000], 3),
        (LayerConfig("full", 16, 1, 1e6, 0.25), 4, False, [0, 41], 5),
        (LayerConfig("full", 512, 2, 1e6, 0.25), 3, False, [262_100], 17),
        *(
            pytest.param(LayerConfig(kind, dim, kv, theta, part), 16, dim == 256, lengths, count, marks=pytest.mark.gpu)
            for kind, dim, kv, theta, part in [("sliding", 256, 8, 1e4, 1.0), ("full", 512, 2, 1e6, 0.25)]
            for lengths, count in [([1024], 256), ([0, 5, 261_888, 8191], 256), ([3], 1), ([0], 1025)]
        ),
    ],
)
def test_qkv_norm_rope(layer, heads, has_v, lengths, count, dtype):
    kv_heads = layer.num_kv_heads
    qkv, *weights = inputs(len(lengths), count, heads, kv_heads, layer.head_dim, has_v=has_v, dtype=dtype)
    inv_freq = inverse_frequencies(layer).to(DEVICE)
    length = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    shape = {"heads": heads, "kv_heads": kv_heads}
    actual = run(qkv, *weights, inv_freq, length, **shape, count=count, rows_cap=11, room=count + 2)
    table = slot_table(len(lengths))
    expected = qkv_norm_rope_reference(qkv, *weights, inv_freq, in_slots(length), table, EPS, **shape)
    assert_all_rounded_alike(actual, expected)


def test_angles_far_out():
    """At 262,143 radians a fast sine is wrong in every digit. The fp32 angle is given; its sine must be right."""
    inv_freq = inverse_frequencies(LayerConfig("sliding", 64, 1, 1e4, 1.0)).to(DEVICE)
    length = torch.tensor([262_128], dtype=torch.int32, device=DEVICE)
    one = torch.ones(64, device=DEVICE)
    qkv = torch.zeros(16, 128, device=DEVICE)
    qkv[:, 64:96] = 1.0  # k = (1, 0) in every pair: turned, it is (cos, sin) times its norm
    _, k, _ = run(qkv[:, :128], one, one, inv_freq, length, heads=1, kv_heads=1, count=16, rows_cap=4, room=16)
    positions = length + torch.arange(16, device=DEVICE)
    angle = (positions[:, None].float() * inv_freq).double()
    norm = (0.5 + EPS) ** -0.5
    expected = torch.cat((angle.cos(), angle.sin()), dim=-1) * norm
    torch.testing.assert_close(k[0, 0].double(), expected, rtol=0, atol=1e-6)
