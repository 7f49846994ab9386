"""Inputs on the device, and how close two ways of computing the same thing must be."""

from collections.abc import Iterable

import torch

from redraft.config import DecodeSettings

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def assert_rounded_alike(actual: torch.Tensor, expected: torch.Tensor, share: float = 0.99) -> None:
    """Equal but for values that fp32 rounding pushed over a rounding boundary of the tensors' dtype.

    fp32 arithmetic in another order differs by some 1e-6, and a BF16 boundary is that near for 1e-6 / 2^-8 of the
    values: far fewer than 1 - share. Such a value moves by one step (at most 2^-7 of it), and where sums or norms
    follow, by a second. fp32 results themselves may differ by that 1e-6, so they only have to be close.
    """
    assert actual.dtype == expected.dtype
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
        return
    # The interpreter stores a BF16 zero as 1e-38.
    same = (actual == expected) | (actual.isnan() & expected.isnan()) | ((actual - expected).abs() < 2e-38)
    assert same.float().mean() >= share, f"{same.float().mean():.4f} of the values are equal"
    # Near zero the step belongs to the sum's terms, not to the sum.
    step = expected.float().nan_to_num(0, 0, 0).square().mean().sqrt().item() * 2**-7
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2**-6, atol=step, equal_nan=True)


def assert_all_rounded_alike(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        assert_rounded_alike(got, wanted)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over that of `expected`."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def gaussian(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """An output tensor on DEVICE that shows what was never written: NaN, or -99 where there is none."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else -99, dtype=dtype, device=DEVICE)


def slot_table(lanes: int) -> torch.Tensor:
    """A pass over every slot but the first, the last one first: int32 [lanes]."""
    return torch.arange(lanes, 0, -1, dtype=torch.int32, device=DEVICE)


def in_slots(by_lane: torch.Tensor) -> torch.Tensor:
    """What lanes hold [W, ...] in the slots of `slot_table`, [W + 1, ...]; the slot without a lane holds poison."""
    return torch.cat((poisoned(1, *by_lane.shape[1:], dtype=by_lane.dtype), by_lane.flip(0)))


def temperature(settings: DecodeSettings, step: int) -> float:
    """Of pass `step`, from 1: it falls linearly, t_max belonging to a step before the first."""
    left = (settings.max_denoising_steps - step + 1) / settings.max_denoising_steps
    return settings.t_min + (settings.t_max - settings.t_min) * left
