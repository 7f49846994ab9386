"""Round to nearest: exact values of hand-computed groups, the error bound on anything, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.config import QuantSpec
from redraft.errors import CheckpointError, UsageError
from redraft.kernels.packing import dequantize, unpack_nibbles
from redraft.quant.report import TensorError, tensor_error
from redraft.quant.rtn import quantize_experts, quantize_rows

# Half a step, plus what rounding z to fp16 may move the grid: its spacing at 8..16 is 2^-7, so half of that.
BOUND = 0.5 + 2.0**-8


def restore(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    packed, scale, zero = quantize_rows(weight, group)
    return dequantize(packed, scale, zero), scale.float().repeat_interleave(group, -1)


def error_of(weight: torch.Tensor, group: int) -> TensorError:
    return tensor_error("w", weight, *quantize_rows(weight, group))


TINY = 2.0**-24  # the smallest fp16
ABOVE = 1093 / 2**14  # the fp16 above 1/15; with the unrounded scale 0.5 * 15 = 7.5 would be a tie
GROUPS_BY_HAND = {  # weight, group, scale, zero, q, restored
    "a group": (
        [[-3.0, 12.0, 0.0, 0.4, 0.6, 11.6, 5.0, -2.9]], 8, [[1.0]], [[3.0]], [[0, 15, 3, 3, 4, 15, 8, 0]],
        [[-3.0, 12.0, 0.0, 0.0, 1.0, 12.0, 5.0, -3.0]],
    ),
    "the zero point is real-valued": ([[-1.25, 13.75]], 2, [[1.0]], [[1.25]], [[0, 15]], [[-1.25, 13.75]]),
    "groups do not see each other": (
        [[-3.0, 12.0, -300.0, 1200.0], [0.0, 15.0, 0.0, -15.0]], 2, [[1.0, 100.0], [1.0, 1.0]],
        [[3.0, 3.0], [0.0, 15.0]], [[0, 15, 0, 15], [0, 15, 15, 0]],
        [[-3.0, 12.0, -300.0, 1200.0], [0.0, 15.0, 0.0, -15.0]],
    ),
    "q is computed from the stored scale": (
        [[0.0, 1.0, 0.5, 0.5]], 4, [[ABOVE]], [[0.0]], [[0, 15, 7, 7]], [[0.0, 15 * ABOVE, 7 * ABOVE, 7 * ABOVE]],
    ),
    "all zero, exact with a usable scale": (
        [[0.0] * 8] * 2, 4, [[TINY] * 2] * 2, [[0.0] * 2] * 2, [[0] * 8] * 2, [[0.0] * 8] * 2,
    ),
    "a range below fp16 is covered by the smallest scale": (
        [[0.0, 14 * TINY, 3 * TINY, TINY / 4]], 4, [[TINY]], [[0.0]], [[0, 14, 3, 0]],
        [[0.0, 14 * TINY, 3 * TINY, 0.0]],
    ),
    # A scale of 1.4 fp16 subnormal steps: rounded to one step it would cut a third of the range off.
    "a subnormal scale is rounded up": (
        [[0.0, 15 * 1.4 * TINY]], 2, [[2 * TINY]], [[0.0]], [[0, 10]], [[0.0, 20 * TINY]],
    ),
    "the largest weights that fit": ([[0.0, 15 * 65504.0]], 2, [[65504.0]], [[0.0]], [[0, 15]], [[0.0, 15 * 65504.0]]),
}  # fmt: skip


@pytest.mark.parametrize("case", GROUPS_BY_HAND.values(), ids=GROUPS_BY_HAND)
def test_groups_by_hand(case):
    weight, group, *expected = case
    packed, scale, zero = quantize_rows(torch.tensor(weight), group)
    found = scale, zero, unpack_nibbles(packed), dequantize(packed, scale, zero)
    assert [tensor.tolist() for tensor in found] == expected


@pytest.mark.parametrize("value", [3.0, -3.0, 1e-3, -1e-3, 6.1e-5, 1e-7, -2e-8])
def test_one_sided_and_constant_groups_are_covered(value: float):
    weight = torch.full((1, 8), value)
    got, scale = restore(weight, 8)
    assert (got - weight).abs().max() <= BOUND * scale.max()
    assert abs(value) / 15 <= scale.max() <= abs(value) / 15 * (1 + 2**-10) + 2.0**-24  # at most one fp16 step above


NUMBERS = st.floats(-400_000, 400_000, width=32, allow_subnormal=True) | st.floats(-1, 1, width=32) | st.just(0.0)


@given(st.lists(NUMBERS, min_size=8, max_size=8), st.sampled_from([1.0, 1e-3, 1e-7]))
@settings(max_examples=300, deadline=None)
def test_no_weight_moves_more_than_half_a_step(values: list[float], factor: float):
    weight = torch.tensor([values]) * factor
    got, scale = restore(weight, 4)
    slack = BOUND * scale.double() + 2.0**-20 * weight.double().abs()  # fp32 rounding of w / s and of the product
    assert ((got.double() - weight.double()).abs() <= slack).all()


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_bound_on_gaussian_weights(group: int, dtype: torch.dtype):
    weight = (torch.randn(64, 256, generator=torch.Generator().manual_seed(group)) * 0.02).to(dtype)
    got, scale = restore(weight, group)
    off = (got - weight.float()).abs() / scale
    assert off.max() <= BOUND
    # Uniform within a step, except the two ends of a group, which are met exactly: neither biased nor saturated.
    assert off.mean() == pytest.approx(0.25 * (1 - 2 / group), abs=0.004)


def test_signal_to_noise_of_the_published_groups():
    # Uniform noise of variance s^2/12 and the mean range of 128 Gaussians, 5.35 sigma, give 10 log10(12 * 225 / 5.35^2)
    # = 19.8 dB; the spread of ranges adds 0.2.
    weight = torch.randn(1, 512, 512, generator=torch.Generator().manual_seed(1))
    for group, expected in ((128, 20.02), (64, 20.95)):
        error = error_of(weight, group)
        assert error.sqnr_db == pytest.approx(expected, abs=0.1)
        assert error.relative_error == pytest.approx(10 ** (-error.sqnr_db / 20), rel=1e-6)


def test_errors_by_hand():
    exact = error_of(torch.zeros(2, 4, 4), 4)
    assert exact.sqnr_db is None and exact.relative_error == 0.0
    error = error_of(torch.tensor([[[0.0, 15.0, 3.25, 4.0]], [[0.0, 15.0, 0.0, 0.0]]]), 4)
    signal = 225 + 3.25**2 + 16 + 225
    assert error.relative_error == pytest.approx((0.25**2 / signal) ** 0.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_refused_with_their_place(bad: float):
    gate_up, down = torch.ones(3, 4, 8), torch.ones(3, 8, 4)
    down[2, 5, 1] = bad
    with pytest.raises(CheckpointError, match=r"layers\.7\.experts\.down_proj\[2\]: 1 of 32 weights are not finite"):
        quantize_experts(gate_up, down, QuantSpec(4, 2), where="layers.7.experts")


@pytest.mark.parametrize("weight", [[0.0, 1e6], [-6e5, 6e5], [-3e38, 3e38]])
def test_weights_beyond_fp16_scales_are_refused(weight: list[float]):
    with pytest.raises(CheckpointError, match=r"blob: weights up to \S+ do not fit"):
        quantize_rows(torch.tensor([weight]), 2, "blob")


def test_indivisible_group_is_refused_with_numbers():
    with pytest.raises(UsageError, match="groups of 6 do not divide 8 weights"):
        quantize_rows(torch.ones(2, 8), 6)


def test_experts_have_the_published_layout_and_match_row_by_row():
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(3, 8, 16, generator=generator).bfloat16()
    down = torch.randn(3, 16, 4, generator=generator).bfloat16()
    packed = quantize_experts(gate_up, down, QuantSpec(8, 2))
    assert packed.gu_q.shape == (3, 8, 8) and packed.gu_q.dtype == torch.uint8
    assert packed.gu_s.shape == packed.gu_z.shape == (3, 8, 2) and packed.gu_s.dtype == torch.float16
    assert packed.dn_q.shape == (3, 16, 2) and packed.dn_s.shape == packed.dn_z.shape == (3, 16, 2)
    for e in range(3):
        expected = (*quantize_rows(gate_up[e], 8), *quantize_rows(down[e], 2))
        assert all(torch.equal(tensor[e], rows) for tensor, rows in zip(vars(packed).values(), expected, strict=True))


def test_a_writer_with_clamped_integer_zero_points_reads_back():
    # The published writer's rule, z = clamp(round(-min / s), 0, 15): another z, the same value rule.
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    lo, hi = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    scale = ((hi - lo) / 15).half()
    zero = (-lo / scale.float()).round().clamp(0, 15).half()
    q = (weight / scale.float() + zero.float()).round().clamp(0, 15).to(torch.uint8)
    got = dequantize(q[:, 0::2] | (q[:, 1::2] << 4), scale, zero)
    assert ((got - weight).abs() <= 0.51 * scale.float()).all()


@pytest.mark.gpu
def test_gpu_and_cpu_give_the_same_bits():
    generator = torch.Generator().manual_seed(5)
    gate_up, down = torch.randn(4, 64, 256, generator=generator), torch.randn(4, 256, 32, generator=generator)
    for dtype in (torch.bfloat16, torch.float32):
        here = quantize_experts(gate_up.to(dtype), down.to(dtype), QuantSpec(128, 32))
        there = quantize_experts(gate_up.to(dtype), down.to(dtype), QuantSpec(128, 32), device="cuda")
        for name in ("gu_q", "gu_s", "gu_z", "dn_q", "dn_s", "dn_z"):
            assert torch.equal(getattr(here, name), getattr(there, name).cpu()), name
