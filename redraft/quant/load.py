"""A MODEL in memory: weights as stored, BF16 experts packed on the way, or random ones drawn."""

from pathlib import Path

import torch

from redraft.config import WEIGHT_FORMATS, QuantSpec, WeightFormat, check_choice
from redraft.errors import CheckpointError, UsageError
from redraft.network.weights import DenseExperts, PackedExperts
from redraft.quant.rtn import packed_experts
from redraft.store.names import Shape
from redraft.store.open import find_checkpoint
from redraft.store.random import is_random, random_checkpoint
from redraft.store.read import Checkpoint, CheckpointFiles, Progress, assemble, open_checkpoint


def load_checkpoint(
    model: str | Path, weights: WeightFormat | None = None, dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu", spec: QuantSpec | None = None, progress: Progress | None = None,
    *, verify: bool = False,
) -> Checkpoint:  # fmt: skip
    """Load any MODEL argument.

    weights "w4" (also None) gives packed experts, quantising a BF16 checkpoint layer by layer on `device` with `spec`
    (None: the published group sizes); "bf16" gives plain experts. Everything but packed experts is cast to `dtype`.
    At no time does more than one layer of unpacked experts exist beside the result. `progress` is called after every
    layer. Raises CheckpointError naming file and tensor, UsageError for settings that do not fit the model.
    """
    check_choice("weights", weights or "w4", WEIGHT_FORMATS)
    if is_random(model):
        return random_checkpoint(model, weights, dtype, device, spec, progress)
    source = open_checkpoint(find_checkpoint(model), verify)
    spec = _choose_spec(source, weights or "w4", spec)
    target = torch.device(device)

    def plain(field: str, name: str, shape: Shape) -> torch.Tensor:
        return source.read(name).to(target, dtype)

    def experts(layer: int) -> DenseExperts | PackedExperts:
        if spec is not None:
            return packed_experts(source, layer, spec, target)
        return DenseExperts(*(tensor.to(target, dtype) for tensor in vars(source.read_experts(layer)).values()))

    network = assemble(source.config, plain, experts, progress)
    return Checkpoint(source.path, source.format, source.config, source.settings, network, spec, source.notes)


def _choose_spec(source: CheckpointFiles, weights: WeightFormat, wanted: QuantSpec | None) -> QuantSpec | None:
    """Group sizes of the experts to be loaded; None for plain ones."""
    if source.spec is not None and weights == "bf16":
        raise CheckpointError(
            f"{source.path}: holds 4-bit experts only, BF16 ones cannot be recovered; load it with weights='w4' or "
            "give the BF16 checkpoint it was made from"
        )
    if source.spec is not None and wanted not in (None, source.spec):
        packed = f"packed with {source.spec}, not {wanted}"
        raise UsageError(f"{source.path}: {packed}; quantise the BF16 checkpoint again")
    if weights == "bf16":
        return None
    spec = source.spec or wanted or QuantSpec()
    spec.check(source.config)
    return spec
