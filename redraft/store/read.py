"""Read and check checkpoint directories of every format in FORMATS.

Everything that can be known from names and headers is checked before a byte of weights is read. Pickled files are
never opened.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from redraft.config import DecodeSettings, ModelConfig, QuantSpec, read_json
from redraft.errors import CheckpointError
from redraft.network.weights import DenseExperts, LayerWeights, PackedExperts, SelfConditioningWeights, Weights
from redraft.store import names
from redraft.store.bf16 import Bf16
from redraft.store.compressed_tensors import CompressedTensors
from redraft.store.dg_w4a16 import DgW4A16
from redraft.store.format import Format
from redraft.store.manifest import check_manifest
from redraft.store.tensorfile import TensorInfo, holds_bytes_of, read_header, read_tensor

Progress = Callable[[int, int], None]  # (steps done, steps in all)

FORMATS: tuple[type[Format], ...] = (CompressedTensors, DgW4A16, Bf16)  # the first that knows a directory reads it
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint whose configuration and headers were read and found consistent; no weights are loaded.

    `text` maps canonical names to the places where the tensor is stored (several when tied names were saved apart);
    `extras` holds what the text network does not use: the vision tower and unknown tensors.
    """

    path: Path
    layout: Format
    config: ModelConfig
    settings: DecodeSettings
    text: dict[str, list[TensorInfo]]
    extras: dict[str, TensorInfo]
    notes: list[str] = field(default_factory=list)

    @property
    def format(self) -> str:
        return self.layout.name

    @property
    def spec(self) -> QuantSpec | None:
        """Group sizes of a packed checkpoint."""
        return self.layout.spec

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Everything stored, by canonical name: a tied tensor once."""
        return {**{name: places[0] for name, places in self.text.items()}, **self.extras}

    @property
    def kept(self) -> dict[str, TensorInfo]:
        """Of `tensors` those that no format packs."""
        return {name: info for name, info in self.tensors.items() if names.part_of(name) != "experts"}

    @property
    def parts(self) -> dict[str, list[TensorInfo]]:
        """`tensors` by the part of the network they belong to, in the order of reports."""
        found: dict[str, list[TensorInfo]] = {part: [] for part in names.PARTS}
        for name, info in self.tensors.items():
            found[names.part_of(name)].append(info)
        return {part: infos for part, infos in found.items() if infos}

    def read(self, name: str) -> torch.Tensor:
        """A tensor by canonical name, on the CPU, dtype as stored.

        Raises CheckpointError when it cannot be read, and when copies under tied names are not equal bit for bit.
        """
        first, *others = self.text.get(name) or [self.extras[name]]
        tensor = read_tensor(first)
        for other in others:
            if other.dtype != first.dtype or not holds_bytes_of(other, tensor):
                raise CheckpointError(f"{other} differs from {first.name}, to which the network ties it")
        return tensor

    def read_experts(self, layer: int) -> DenseExperts | PackedExperts:
        """A layer's experts as they are stored, on the CPU. Raises CheckpointError."""
        return self.layout.read_layer(self.read, self.config, layer, str(self.path))

    def experts_place(self, layer: int) -> str:
        """File and common name of a layer's unpacked experts, for error messages."""
        gate_up, _ = names.expert_names(layer)
        return f"{self.text[gate_up][0].file}: tensor {gate_up.removesuffix('.gate_up_proj')}"


def open_checkpoint(path: Path, verify: bool = False) -> CheckpointFiles:
    """Read configuration and headers of a local directory and check them against each other.

    `verify` also compares every tensor with the sha256 in manifest.json, which only directories written by
    Redraft have. Raises CheckpointError naming the file and the tensor.
    """
    raw = read_json(path / "config.json")
    config = ModelConfig.from_dict(raw, str(path / "config.json"))
    layout = _layout(path, raw, config)
    infos = [info for file in _weight_files(path, layout) for info in read_header(file)]
    fence = layout.fence[1] if layout.fence else None
    text, extras = _sort_tensors([info for info in infos if info.numel or info.name != fence])
    layout = layout.settled(path, config, text)
    _check_tensors(path, layout, config, text)
    settings, notes, file = DecodeSettings(), _notes(extras), path / "generation_config.json"
    if file.exists():
        settings = DecodeSettings.from_generation_config(read_json(file), str(file))
    else:
        notes.append("generation_config.json is missing: using DiffusionGemma's published decoding settings")
    check_manifest(path, infos, layout.spec is not None, verify)
    return CheckpointFiles(path, layout, config, settings, text, extras, notes)


def _layout(path: Path, raw: dict[str, Any], config: ModelConfig) -> Format:
    """The format of a directory. Methods of quantisation that are not read are refused."""
    quantization = raw.get("quantization_config") or None
    if quantization is not None:
        methods = [form.name for form in FORMATS if form is not Bf16]
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        if method not in methods:
            raise CheckpointError(
                f"{path / 'config.json'}: quantised with {method!r}, which Redraft does not read; start from the BF16 "
                f"checkpoint or one in {' or '.join(methods)}"
            )
    return next(found for form in FORMATS if (found := form.describe(path, quantization, config)) is not None)


def _weight_files(path: Path, layout: Format) -> list[Path]:
    experts = layout.expert_files(path)
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors", *experts]
    if (path / INDEX).is_file():
        return list(dict.fromkeys([*_indexed_files(path), *experts]))
    loose = sorted(path.glob("model*.safetensors"))
    if loose and experts:
        return [*loose, *experts]
    if loose:
        shards = f"the {len(loose)} shards beside it"
        raise CheckpointError(f"{path / INDEX}: file is missing, so {shards} may be incomplete")
    pickles = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in path.glob(kind))
    if pickles:
        raise CheckpointError(
            f"{path / pickles[0]}: pickled weights can run code and are not read; load the model with transformers and "
            "save it again with save_pretrained, which writes safetensors"
        )
    raise CheckpointError(f"{path}: no model.safetensors or {INDEX}; this is not a checkpoint directory")


def _indexed_files(path: Path) -> list[Path]:
    """The shards an index names. A missing shard, or a shard without a tensor promised to be in it, is an error."""
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX}: weight_map is missing or empty")
    promised: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path / INDEX}: tensor {tensor} is said to be in {shard!r}, expected a file name")
        promised.setdefault(shard, []).append(tensor)
    for shard, tensors in promised.items():
        if not (path / shard).is_file():
            more = f"{len(tensors) - 1} more tensors"
            raise CheckpointError(f"{path / shard}: shard is missing; it holds {tensors[0]} and {more}")
        absent = set(tensors) - {info.name for info in read_header(path / shard)}
        if absent:
            raise CheckpointError(f"{path / shard}: tensor {min(absent)} is missing, though {INDEX} says it is here")
    return [path / shard for shard in sorted(promised)]


def _sort_tensors(infos: list[TensorInfo]) -> tuple[dict[str, list[TensorInfo]], dict[str, TensorInfo]]:
    """Split into the text network, tied names grouped with the decoder's own name first, and the rest."""
    text: dict[str, list[TensorInfo]] = {}
    extras: dict[str, TensorInfo] = {}
    for info in infos:
        name = names.canonical_name(info.name)
        if name.startswith((names.DECODER, names.ENCODER)):
            text.setdefault(name, []).append(info)
        else:
            extras[name] = info
    for name, places in text.items():
        places.sort(key=lambda info: info.name != name)
    return text, extras


def _check_tensors(path: Path, layout: Format, config: ModelConfig, text: dict[str, list[TensorInfo]]) -> None:
    expected = layout.tensors(config)
    missing = [name for name in expected if name not in text]
    if missing:
        more = f" ({len(missing) - 1} more are missing too)" if len(missing) > 1 else ""
        raise CheckpointError(f"{layout.place(path, missing[0])}: tensor {missing[0]} is missing{more}")
    for name, places in text.items():
        if name not in expected:
            raise CheckpointError(f"{places[0]} belongs to no layer of the network that config.json describes")
        dtypes, shape = expected[name]
        for info in places:
            if info.shape != shape:
                raise CheckpointError(f"{info} has shape {list(info.shape)}, expected {list(shape)}")
            if info.dtype not in dtypes:
                raise CheckpointError(f"{info} has dtype {info.dtype}, expected {' or '.join(dtypes)}")


def _notes(extras: dict[str, TensorInfo]) -> list[str]:
    vision = [name for name in extras if name.startswith(names.VISION)]
    unknown = [name for name in extras if not name.startswith(names.VISION)]
    notes = []
    if vision:
        towers = ", ".join(sorted({name.split(".")[2] for name in vision}))
        notes.append(f"{len(vision)} vision tensors ({towers}) recognised and left out: text only for now")
    if unknown:
        some = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        notes.append(f"{len(unknown)} unknown tensors left out: {some}")
    return notes


@dataclass
class Checkpoint:
    """A loaded checkpoint. `format` and `spec` describe the files and the packed experts; `notes` what was left out."""

    path: Path
    format: str
    config: ModelConfig
    settings: DecodeSettings
    weights: Weights
    spec: QuantSpec | None  # group sizes of the experts in `weights`; None when they are not packed
    notes: list[str]


def assemble(
    config: ModelConfig, tensor: Callable[[str, str, names.Shape], torch.Tensor],
    experts: Callable[[int], DenseExperts | PackedExperts], progress: Progress | None,
) -> Weights:  # fmt: skip
    """A network of what `tensor(field, canonical name, shape)` and `experts(layer)` return, layer after layer."""
    layers = []
    for i in range(config.num_layers):
        table = names.layer_tensors(config, i)
        plain: dict[str, Any] = {"v_proj": None, **{field: tensor(field, *place) for field, place in table.items()}}
        layers.append(LayerWeights(**plain, experts=experts(i)))
        if progress is not None:
            progress(i + 1, config.num_layers)
    shared = {field: tensor(field, *place) for field, place in names.shared_tensors(config).items()}
    return Weights(shared.pop("embed"), layers, shared.pop("norm"), SelfConditioningWeights(**shared))
