"""LoRA adapters in PEFT's format, merged into a checkpoint: W + B A * scale in fp32, rounded once to W's dtype.

The scale is alpha / r, or alpha / sqrt(r) with `use_rslora`; `rank_pattern` and `alpha_pattern` give single modules
their own r and alpha (LoRA: arXiv 2106.09685; rank-stabilised: arXiv 2312.03732).

Encoder and decoder share their text weights, but PEFT adapts modules, not weights, so an adapter may name a layer on
either side or on both. Named on both, the factors must be equal: two different sums do not fit into one weight. Named
on one, the update fits too, but the side that was left alone would be changed with it, which nobody trained: that is
refused unless it is asked for.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from redraft.config import read_json
from redraft.errors import CheckpointError
from redraft.store.names import DECODER, ENCODER, FLOATS, canonical_name, full_name, part_of
from redraft.store.open import find_checkpoint, published_label
from redraft.store.read import Progress, open_checkpoint
from redraft.store.tensorfile import TensorInfo, file_sha256, read_header, read_tensor
from redraft.store.write import plan_changes, write_checkpoint

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Fields that change no merged weight: what was adapted, which the tensors' names say again, and how it was trained.
_NO_EFFECT = frozenset((
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
))  # fmt: skip
_READ = frozenset(("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"))
_UNCHANGED_BASE = (None, True, False, "gaussian", "eva", "orthogonal")  # initialisations that leave the base as it is


@dataclass(frozen=True)
class Factors:
    """One module's LoRA as stored: a [r, in], b [out, r]."""

    module: str  # as the adapter names it
    a: TensorInfo
    b: TensorInfo
    scale: float

    def delta(self) -> torch.Tensor:
        """B A * scale, fp32 [out, in]."""
        return (read_tensor(self.b).float() @ read_tensor(self.a).float()) * self.scale

    def equals(self, other: Self) -> bool:
        """Whether both add the same to a weight, bit for bit."""
        pairs = ((self.a, other.a), (self.b, other.b))
        return self.scale == other.scale and all(torch.equal(read_tensor(x), read_tensor(y)) for x, y in pairs)


@dataclass(frozen=True)
class MergedTensor:
    """One weight that was changed, by canonical name, and the adapter's modules that did it."""

    name: str
    modules: list[str]
    rank: int
    scale: float


@dataclass(frozen=True)
class MergeReport:
    """The outcome of `merge_lora`."""

    base: str
    adapter: str
    tensors: list[MergedTensor]
    notes: list[str]


def merge_lora(
    base: str | Path, adapter: str | Path, dst: str | Path,
    *, both_sides: bool = False, overwrite: bool = False, progress: Progress | None = None,
) -> MergeReport:  # fmt: skip
    """Write the BF16 checkpoint `base` with the PEFT adapter `adapter` merged to the directory `dst`.

    Both are directories or hub ids. Everything the adapter does not name is kept bit for bit; the report lists what was
    changed. both_sides: merge what is named on one side only into the weight that encoder and decoder share. Resumes
    and replaces like `quantize`. Raises CheckpointError naming file and field or tensor when anything of the adapter
    cannot be merged, UsageError when `dst` cannot be the target.
    """
    source = open_checkpoint(find_checkpoint(base))
    if source.spec is not None:
        raise CheckpointError(
            f"{source.path}: is packed ({source.format}); merge into the BF16 checkpoint, then quantise the result"
        )
    folder = find_checkpoint(adapter)
    shapes = {name: info.shape for name, info in source.tensors.items()}
    targets = assign(read_adapter(folder), shapes, str(source.path))
    sentences = one_sided(targets)
    if sentences and not both_sides:
        raise CheckpointError(
            f"{folder / WEIGHTS}: {sentences[0]}; train it with the same factors on both sides, or merge into the "
            "shared weights all the same with --both-sides"
        )

    def merged(name: str, weight: torch.Tensor) -> torch.Tensor:
        return merge(weight, targets[name][0]) if name in targets else weight

    identity = ["merge-lora", file_sha256(folder / CONFIG), file_sha256(folder / WEIGHTS)]
    parts = plan_changes(source, merged)
    write_checkpoint(source, Path(dst), parts, identity, overwrite=overwrite, progress=progress)
    changed = [
        MergedTensor(name, [f.module for f in fs], fs[0].a.shape[0], fs[0].scale) for name, fs in targets.items()
    ]
    labels = published_label(base, source.path), published_label(adapter, folder)
    return MergeReport(*labels, changed, sentences)


def read_adapter(folder: Path) -> list[Factors]:
    """The factors of an adapter directory, sorted by module. Configuration and headers are checked, no weights read.

    Raises CheckpointError for anything that is not plain LoRA on Linear layers: other methods, DoRA, biases, whole
    modules trained along, initialisations that change the base, pickled weights.
    """
    weights, pickled = folder / WEIGHTS, folder / "adapter_model.bin"
    if not weights.is_file() and pickled.is_file():
        raise CheckpointError(
            f"{pickled}: pickled weights can run code and are not read; load the adapter with peft and save it again "
            "with save_pretrained, which writes safetensors"
        )
    if not weights.is_file():
        raise CheckpointError(f"{weights}: file is missing; this is not a PEFT adapter directory")
    config = read_json(folder / CONFIG)
    _check_config(folder / CONFIG, config)
    modules: dict[str, dict[str, TensorInfo]] = {}
    for info in read_header(weights):
        found = _FACTOR.fullmatch(info.name)
        if not found:
            raise CheckpointError(f"{info} is not a LoRA factor of a Linear (...lora_A.weight or ...lora_B.weight)")
        modules.setdefault(found[1], {})[found[2]] = info
    if not modules:
        raise CheckpointError(f"{weights}: holds no tensors")
    return [_factors(folder / CONFIG, config, module, pair) for module, pair in sorted(modules.items())]


def _check_config(file: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{file}: peft_type is {config.get('peft_type')!r}; only 'LORA' can be merged")
    initial = config.get("init_lora_weights")
    if initial not in _UNCHANGED_BASE:
        raise CheckpointError(
            f"{file}: init_lora_weights {initial!r} changes the base weights as well; save the adapter converted to "
            "plain LoRA (path_initial_model_for_weight_conversion of peft's save_pretrained)"
        )
    for key, value in config.items():
        if key not in _NO_EFFECT | _READ and value and value != "none":
            raise CheckpointError(f"{file}: {key} is {value!r}; only plain LoRA on Linear layers can be merged")


def _factors(file: Path, config: Mapping[str, Any], module: str, pair: Mapping[str, TensorInfo]) -> Factors:
    for factor, other in (("A", "B"), ("B", "A")):
        if factor not in pair:
            raise CheckpointError(f"{pair[other]}: its other factor, lora_{factor}.weight, is missing")
    a, b = pair["A"], pair["B"]
    for info in (a, b):
        if info.dtype not in FLOATS or len(info.shape) != 2:
            raise CheckpointError(f"{info} is {info.dtype} {list(info.shape)}, expected a matrix of floats")
    rank = _setting(file, config, "rank_pattern", "r", module)
    alpha = _setting(file, config, "alpha_pattern", "lora_alpha", module)
    if a.shape[0] != rank or b.shape[1] != rank:
        raise CheckpointError(
            f"{a} and lora_B have ranks {a.shape[0]} and {b.shape[1]}, {file.name} means {rank:g} for this module"
        )
    return Factors(module, a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _setting(file: Path, config: Mapping[str, Any], patterns: str, default: str, module: str) -> float:
    """The module's own value if a pattern matches the end of its name, as peft matches it, else the common one."""
    value = config.get(default)
    try:
        for pattern, own in (config.get(patterns) or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                value = own
                break
    except (re.error, AttributeError) as e:
        raise CheckpointError(f"{file}: {patterns} cannot be read ({e})") from None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise CheckpointError(f"{file}: {default} of {module} is {value!r}, expected a positive number")
    return value


def assign(factors: list[Factors], shapes: Mapping[str, tuple[int, ...]], model: str) -> dict[str, list[Factors]]:
    """Canonical tensor name -> the factors merged into it: one, or two equal ones for a weight named on both sides.

    `shapes` are those of the model's weights, by canonical name, and `model` what errors call it. Raises
    CheckpointError naming a module that is no Linear of it, whose shape does not fit, or whose factors differ between
    encoder and decoder.
    """
    targets: dict[str, list[Factors]] = {}
    for f in factors:
        name = canonical_name(f"{f.module}.weight")
        if name not in shapes:
            raise CheckpointError(f"{f.a}: {f.module} is not a Linear layer of {model}")
        if part_of(name) == "embedding":
            raise CheckpointError(f"{f.a}: {f.module} is the tied embedding, which cannot be merged as a Linear layer")
        shape = (f.b.shape[0], f.a.shape[1])
        if shapes[name] != shape:
            raise CheckpointError(f"{f.a}: makes a {list(shape)} update, {name} is {list(shapes[name])}")
        others = targets.setdefault(name, [])
        if others and not f.equals(others[0]):
            raise CheckpointError(
                f"{f.a.file}: the LoRA of {f.module} differs from that of {others[0].module}, but both change one tied "
                "weight; an adapter can be merged when both sides have the same factors"
            )
        others.append(f)
    return targets


def merge(weight: torch.Tensor, factors: Factors) -> torch.Tensor:
    """W + B A * scale, summed in fp32, in the dtype and on the device of `weight`.

    Raises CheckpointError when the result is not finite.
    """
    merged = (weight.float() + factors.delta().to(weight.device)).to(weight.dtype)
    if not bool(torch.isfinite(merged).all()):
        raise CheckpointError(f"{factors.a}: the merged weight is not finite in {weight.dtype}; the adapter is damaged")
    return merged


def one_sided(targets: Mapping[str, list[Factors]]) -> list[str]:
    """What merging changes beyond the modules that the adapter names, a sentence for each side."""
    sentences = []
    for prefix, side, other in ((ENCODER, "encoder", "decoder"), (DECODER, "decoder", "encoder")):
        single = {name: f for name, (f, *more) in targets.items() if not more and name.startswith(f"{DECODER}layers.")}
        if shared := [name for name, f in single.items() if full_name(f.module).startswith(prefix)]:
            sentences.append(
                f"{len(shared)} weights are named on the {side}'s side only, {shared[0]} among them; they are tied, so "
                f"merging changes the {other} too, which the unmerged adapter leaves as it was"
            )
    return sentences
