"""What a quantisation did: the error of every packed tensor, the bytes saved, and what was kept as it was and why."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from redraft.config import QuantSpec
from redraft.kernels.packing import dequantize

if TYPE_CHECKING:
    from redraft.store.read import CheckpointFiles

REASONS = {
    "embedding": "also the output head; 4-bit noise there raises entropy and costs denoising passes",
    "attention": "4-bit noise there raises entropy and costs denoising passes; small beside the experts",
    "dense MLP": "read for every token; small beside the experts",
    "router": "an error there sends tokens to other experts; tiny",
    "norms": "norm weights and layer scalars are vectors; tiny",
    "self-conditioning": "feeds every pass's output into the next; small beside the experts",
    "vision": "not run yet; carried unchanged so that nothing is lost",
    "other": "not part of the network Redraft knows; carried unchanged so that nothing is lost",
}


@dataclass(frozen=True)
class TensorError:
    """Rounding error of one packed tensor.

    `sqnr_db` = 10 log10(sum w^2 / sum (w - w4)^2), infinite when exact; `relative_error` = |w - w4| / |w| (Frobenius).
    """

    name: str
    sqnr_db: float | None
    relative_error: float


@dataclass(frozen=True)
class Kept:
    """One part of the network that was not quantised."""

    part: str
    tensors: int
    bytes: int
    reason: str


@dataclass(frozen=True)
class QuantReport:
    """The outcome of `redraft.quantize` and of exports. Bytes count every tensor in the source and in the result."""

    source: str  # hub id or directory name
    spec: QuantSpec
    tensors: list[TensorError]
    kept: list[Kept]
    bytes_before: int
    bytes_after: int

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return dataclasses.asdict(self)


def tensor_error(
    name: str, weight: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
) -> TensorError:
    """Compare weight [E, N, K] with its packed form, on the latter's device, expert by expert in fp64."""
    signal = noise = 0.0
    for e in range(weight.shape[0]):
        w = weight[e].to(packed.device).float()
        signal += float(w.square().sum(dtype=torch.float64))
        noise += float((w - dequantize(packed[e], scale[e], zero[e])).square().sum(dtype=torch.float64))
    if noise == 0.0:
        return TensorError(name, None, 0.0)
    return TensorError(name, 10 * math.log10(signal / noise), math.sqrt(noise / signal))


def make_report(
    source: CheckpointFiles, label: str, spec: QuantSpec, errors: list[TensorError], bytes_after: int
) -> QuantReport:
    """The report on packing the experts of `source`, which published files call `label`."""
    sizes = {part: [info.nbytes for info in infos] for part, infos in source.parts.items()}
    kept = [Kept(part, len(sizes[part]), sum(sizes[part]), why) for part, why in REASONS.items() if part in sizes]
    return QuantReport(label, spec, errors, kept, sum(map(sum, sizes.values())), bytes_after)
