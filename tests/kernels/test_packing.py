"""Nibble packing and the value rule w = (q - z) * s."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redraft.kernels.packing import dequantize, pack_nibbles, unpack_nibbles


def test_low_nibble_comes_first():
    q = torch.tensor([[1, 2, 15, 0], [0, 15, 7, 8]], dtype=torch.uint8)
    assert pack_nibbles(q).tolist() == [[0x21, 0x0F], [0xF0, 0x87]]


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda q: len(q) % 2 == 0), st.integers(1, 3))
def test_round_trip(values: list[int], rows: int):
    q = torch.tensor([values] * rows, dtype=torch.uint8)
    packed = pack_nibbles(q)
    assert packed.shape == (rows, len(values) // 2) and packed.dtype == torch.uint8
    assert torch.equal(unpack_nibbles(packed), q)


def test_every_byte_survives():
    packed = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_nibbles(unpack_nibbles(packed)), packed)


def test_odd_length_is_refused():
    with pytest.raises(ValueError, match="odd number of elements, found 3"):
        pack_nibbles(torch.zeros(2, 3, dtype=torch.uint8))


def test_dequantize_by_hand():
    packed = pack_nibbles(torch.tensor([[0, 15, 4, 9]], dtype=torch.uint8))
    scale = torch.tensor([[0.5, 2.0]], dtype=torch.float16)
    zero = torch.tensor([[7.5, 4.0]], dtype=torch.float16)
    assert dequantize(packed, scale, zero).tolist() == [[-3.75, 3.75, 0.0, 10.0]]


def test_dequantize_computes_in_fp32_and_casts_last():
    packed = torch.full((1, 1), 0x0F, dtype=torch.uint8)
    scale, zero = torch.tensor([[0.1]]).half(), torch.tensor([[7.3]]).half()
    exact = (15 - zero.double()) * scale.double()  # fits fp32 nearly exactly, fp16 arithmetic would round twice
    assert dequantize(packed, scale, zero)[0, 0].item() == pytest.approx(exact.item(), rel=1e-7)
    got = dequantize(packed, scale, zero, torch.bfloat16)
    assert got.dtype == torch.bfloat16 and got[0, 0] == exact.float().bfloat16()
