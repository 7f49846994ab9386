"""Find, check and read checkpoints: BF16 directories, and packed ones in `dg-w4a16-v1` or compressed-tensors.

Everything that can be known from names and headers is checked before a byte of weights is read. Weights are then read
layer by layer into memory of their own. Pickled files are never opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from redraft.config import (
    WEIGHT_FORMATS,
    DecodeSettings,
    ModelConfig,
    QuantSpec,
    WeightFormat,
    check_choice,
    read_json,
)
from redraft.errors import CheckpointError, UsageError
from redraft.network.weights import (
    DenseExperts,
    LayerWeights,
    PackedExperts,
    SelfConditioningWeights,
    Weights,
    iter_tensors,
)
from redraft.quant.rtn import quantize_experts
from redraft.store import compressed_tensors, dg_w4a16
from redraft.store.names import (
    DECODER,
    ENCODER,
    VISION,
    canonical_name,
    expected_tensors,
    expert_names,
    layer_tensors,
    packed_layer,
    packed_name,
    part_of,
    shared_tensors,
)
from redraft.store.random import is_random, random_checkpoint
from redraft.store.tensorfile import TensorInfo, file_sha256, holds_bytes_of, read_header, read_tensor, tensor_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int], None]  # (steps done, steps in all)
StoredFormat = Literal["bf16", "dg-w4a16-v1", "compressed-tensors"]

DEMO = Path(__file__).parents[1] / "demo" / "checkpoint"
INDEX = "model.safetensors.index.json"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def find_checkpoint(model: str | Path) -> Path:
    """The local directory of a model: a directory, "demo" (the bundled model), or a hub id, downloaded when needed.

    Raises CheckpointError when it is none of these or cannot be downloaded.
    """
    if model == "demo":
        if not DEMO.is_dir():
            raise CheckpointError(
                f"{DEMO}: the bundled checkpoint is missing from this installation; reinstall Redraft"
            )
        return DEMO
    if is_random(model):
        raise CheckpointError(f"{model}: random weights live in memory and have no files; give a stored checkpoint")
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path}: is a file, expected a checkpoint directory; name the directory that holds it")
    if isinstance(model, str) and _HUB_ID.fullmatch(model) and not model.startswith("."):
        return _download(model)
    raise CheckpointError(
        f"{model}: no such directory; give a checkpoint directory, a hub id such as org/name, or demo"
    )


def published_label(model: str | Path, path: Path) -> str:
    """What written files call the model found at `path`: a hub id or the directory's name, no path of this machine."""
    return path.resolve().name if Path(model).expanduser().is_dir() else str(model)


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES)))
    except Exception as e:  # the hub client raises its own, httpx's and plain OS errors
        reason = next((line for line in str(e).splitlines() if line.strip()), "no reason given").strip()
        raise CheckpointError(
            f"{hub_id}: no such directory here, and the hub download failed ({type(e).__name__}: {reason}); check the "
            "name, the network and your access rights, or download it elsewhere and give the directory"
        ) from e


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint whose configuration and headers were read and found consistent; no weights are loaded.

    `text` maps canonical names to the places where the tensor is stored (several when tied names were saved apart);
    `extras` holds what the text network does not use: the vision tower and unknown tensors.
    """

    path: Path
    format: StoredFormat
    config: ModelConfig
    settings: DecodeSettings
    spec: QuantSpec | None  # group sizes of a packed checkpoint
    text: dict[str, list[TensorInfo]]
    extras: dict[str, TensorInfo]
    notes: list[str] = field(default_factory=list)

    def read(self, name: str) -> torch.Tensor:
        """A tensor by canonical name, on the CPU, dtype as stored.

        Raises CheckpointError when it cannot be read, and when copies under tied names are not equal bit for bit.
        """
        if name in self.extras:
            return read_tensor(self.extras[name])
        first, *others = self.text[name]
        tensor = read_tensor(first)
        for other in others:
            if other.dtype != first.dtype or not holds_bytes_of(other, tensor):
                raise CheckpointError(f"{other} differs from {first.name}, to which the network ties it")
        return tensor


def open_checkpoint(path: Path, verify: bool = False) -> CheckpointFiles:
    """Read configuration and headers of a local directory and check them against each other.

    `verify` also compares every tensor with the sha256 in manifest.json, which only directories written by
    Redraft have. Raises CheckpointError naming the file and the tensor.
    """
    raw = read_json(path / "config.json")
    config = ModelConfig.from_dict(raw, str(path / "config.json"))
    quantization = _read_quantization(path, raw)
    described = _packing_described(path, quantization)
    scheme = _read_scheme(path, quantization, config)
    infos = [info for file in _weight_files(path, bool(described)) for info in read_header(file)]
    fenced = {dg_w4a16.FENCE} if described else set()
    text, extras = _sort_tensors([info for info in infos if info.numel or info.name not in fenced])
    spec = _spec_of(path, described, config, text) if described else None
    expected = expected_tensors(config, spec)
    if scheme is not None:
        spec = scheme.spec
        plain = {name: entry for name, entry in expected.items() if part_of(name) != "experts"}
        expected = plain | compressed_tensors.expected_experts(config, scheme)
    _check_tensors(path, expected, text)
    settings, notes = _settings(path)
    files = CheckpointFiles(
        path=path,
        format="compressed-tensors" if scheme else "dg-w4a16-v1" if described else "bf16",
        config=config,
        settings=settings,
        spec=spec,
        text=text,
        extras=extras,
        notes=_notes(extras) + notes,
    )
    _check_manifest(files, infos, verify)
    return files


def _read_quantization(path: Path, raw: dict[str, Any]) -> dict[str, Any] | None:
    """`quantization_config` of a configuration, if there is one. Methods that are not read are refused."""
    found = raw.get("quantization_config")
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found
    if method not in (dg_w4a16.FORMAT, compressed_tensors.FORMAT):
        raise CheckpointError(
            f"{path / 'config.json'}: quantised with {method!r}, which Redraft does not read; start from the BF16 "
            f"checkpoint or one in {dg_w4a16.FORMAT} or {compressed_tensors.FORMAT}"
        )
    return dict(found)


def _packing_described(path: Path, quantization: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """What describes packed experts, by file name; empty when they are not packed in `dg-w4a16-v1`.

    That is w4_meta.json, config.json, or both: `save_pretrained` of transformers writes the latter only.
    """
    described = {}
    if quantization is not None and quantization["quant_method"] == dg_w4a16.FORMAT:
        described["config.json"] = quantization
    if (path / dg_w4a16.META).exists() or (not described and any(path.glob(dg_w4a16.EXPERT_FILES))):
        described[dg_w4a16.META] = dg_w4a16.read_meta(path)
    return described


def _read_scheme(
    path: Path, quantization: dict[str, Any] | None, config: ModelConfig
) -> compressed_tensors.Scheme | None:
    """How a compressed-tensors checkpoint is packed; None for others."""
    if quantization is None or quantization["quant_method"] != compressed_tensors.FORMAT:
        return None
    where = str(path / "config.json")
    scheme = compressed_tensors.read_scheme(where, quantization)
    try:
        compressed_tensors.check_fit(config, scheme, where)
    except UsageError as e:
        raise CheckpointError(str(e)) from None
    return scheme


def _weight_files(path: Path, packed: bool) -> list[Path]:
    experts = sorted(path.glob(dg_w4a16.EXPERT_FILES)) if packed else []
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors", *experts]
    if (path / INDEX).is_file():
        return list(dict.fromkeys([*_indexed_files(path), *experts]))
    loose = sorted(path.glob("model*.safetensors"))
    if loose and packed:
        return [*loose, *experts]
    if loose:
        raise CheckpointError(
            f"{path / INDEX}: file is missing, so the {len(loose)} shards beside it may be incomplete"
        )
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
    for shard, names in promised.items():
        if not (path / shard).is_file():
            raise CheckpointError(
                f"{path / shard}: shard is missing; it holds {names[0]} and {len(names) - 1} more tensors"
            )
        absent = set(names) - {info.name for info in read_header(path / shard)}
        if absent:
            raise CheckpointError(f"{path / shard}: tensor {min(absent)} is missing, though {INDEX} says it is here")
    return [path / shard for shard in sorted(promised)]


def _sort_tensors(infos: list[TensorInfo]) -> tuple[dict[str, list[TensorInfo]], dict[str, TensorInfo]]:
    """Split into the text network, tied names grouped with the decoder's own name first, and the rest."""
    text: dict[str, list[TensorInfo]] = {}
    extras: dict[str, TensorInfo] = {}
    for info in infos:
        name = canonical_name(info.name)
        if name.startswith((DECODER, ENCODER)):
            text.setdefault(name, []).append(info)
        else:
            extras[name] = info
    for name, places in text.items():
        places.sort(key=lambda info: info.name != name)
    return text, extras


def _spec_of(
    path: Path, described: dict[str, dict[str, Any]], config: ModelConfig, text: dict[str, list[TensorInfo]]
) -> QuantSpec:
    shapes = []
    for name in (packed_name(0, "gu_s"), packed_name(0, "dn_s")):
        if name not in text:
            raise CheckpointError(f"{_expert_place(path, 0)}: tensor {name} is missing")
        shapes.append(text[name][0].shape)
    return dg_w4a16.infer_spec(path, described, config, *shapes)


def _expert_place(path: Path, layer: int) -> Path:
    """Where a layer's packed experts should be: a file of their own, unless transformers wrote the directory."""
    return path / dg_w4a16.expert_file(layer) if any(path.glob(dg_w4a16.EXPERT_FILES)) else path


def _check_tensors(
    path: Path, expected: dict[str, tuple[tuple[str, ...], tuple[int, ...]]], text: dict[str, list[TensorInfo]]
) -> None:
    missing = [name for name in expected if name not in text]
    if missing:
        layer = packed_layer(missing[0])
        place = path if layer is None else _expert_place(path, layer)
        more = f" ({len(missing) - 1} more are missing too)" if len(missing) > 1 else ""
        raise CheckpointError(f"{place}: tensor {missing[0]} is missing{more}")
    for name, places in text.items():
        if name not in expected:
            raise CheckpointError(f"{places[0]} belongs to no layer of the network that config.json describes")
        dtypes, shape = expected[name]
        for info in places:
            if info.shape != shape:
                raise CheckpointError(f"{info} has shape {list(info.shape)}, expected {list(shape)}")
            if info.dtype not in dtypes:
                raise CheckpointError(f"{info} has dtype {info.dtype}, expected {' or '.join(dtypes)}")


def _settings(path: Path) -> tuple[DecodeSettings, list[str]]:
    file = path / "generation_config.json"
    if file.exists():
        return DecodeSettings.from_generation_config(read_json(file), str(file)), []
    return DecodeSettings(), ["generation_config.json is missing: using DiffusionGemma's published decoding settings"]


def _notes(extras: dict[str, TensorInfo]) -> list[str]:
    vision = [name for name in extras if name.startswith(VISION)]
    unknown = [name for name in extras if not name.startswith(VISION)]
    notes = []
    if vision:
        towers = ", ".join(sorted({name.split(".")[2] for name in vision}))
        notes.append(f"{len(vision)} vision tensors ({towers}) recognised and left out: text only for now")
    if unknown:
        names = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        notes.append(f"{len(unknown)} unknown tensors left out: {names}")
    return notes


def _check_manifest(files: CheckpointFiles, infos: list[TensorInfo], verify: bool) -> None:
    """Compare with manifest.json, if there is one: sizes, dtypes and shapes always, hashes when `verify` is set."""
    manifest_file = files.path / dg_w4a16.MANIFEST
    if not manifest_file.exists() or (files.format == "bf16" and not verify):
        if verify:
            raise CheckpointError(f"{manifest_file}: file is missing, so there are no hashes to verify against")
        return
    manifest = read_json(manifest_file)
    try:
        _check_manifest_headers(files.path, manifest, infos)
        if verify:
            _check_manifest_hashes(files, manifest, infos)
    except (KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{manifest_file}: malformed ({type(e).__name__}: {e})") from None


def _check_manifest_headers(path: Path, manifest: dict[str, Any], infos: list[TensorInfo]) -> None:
    for name, entry in manifest["files"].items():
        # Only the weights: a tokenizer or generation_config.json edited by its owner is no reason to refuse.
        if not name.endswith(".safetensors"):
            continue
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != entry["bytes"]:
            raise CheckpointError(f"{path / name}: has {size} bytes, {dg_w4a16.MANIFEST} recorded {entry['bytes']}")
    recorded = manifest["tensors"]
    for info in infos:
        entry = recorded.get(info.name)
        found = {"file": info.file.name, "dtype": info.dtype, "shape": list(info.shape)}
        if entry is None or {key: entry[key] for key in found} != found:
            raise CheckpointError(
                f"{info} differs from what {dg_w4a16.MANIFEST} recorded for it: {found} against {entry}"
            )
    absent = set(recorded) - {info.name for info in infos}
    if absent:
        raise CheckpointError(f"{path / recorded[min(absent)]['file']}: tensor {min(absent)} is missing")


def _check_manifest_hashes(files: CheckpointFiles, manifest: dict[str, Any], infos: list[TensorInfo]) -> None:
    for name, entry in manifest["files"].items():
        file = files.path / name
        if "sha256" in entry and (not file.is_file() or file_sha256(file) != entry["sha256"]):
            raise CheckpointError(f"{file}: changed, damaged or missing: its sha256 is not {dg_w4a16.MANIFEST}'s")
    for info in infos:
        digest = tensor_sha256(read_tensor(info))
        if digest != manifest["tensors"][info.name]["sha256"]:
            raise CheckpointError(f"{info} has another sha256 than {dg_w4a16.MANIFEST} recorded; the file is damaged")


@dataclass
class Checkpoint:
    """A loaded checkpoint. `format` and `spec` describe the files and the packed experts; `notes` what was left out."""

    path: Path
    format: StoredFormat
    config: ModelConfig
    settings: DecodeSettings
    weights: Weights
    spec: QuantSpec | None  # group sizes of the experts in `weights`; None when they are not packed
    notes: list[str]


def load_checkpoint(
    model: str | Path,
    weights: WeightFormat | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    spec: QuantSpec | None = None,
    progress: Progress | None = None,
    *,
    verify: bool = False,
) -> Checkpoint:
    """Load a model for `find_checkpoint`'s argument, or draw one (`random:NAME`).

    weights "w4" (also None) gives packed experts, quantising a BF16 checkpoint layer by layer on `device` with `spec`
    (None: the published group sizes); "bf16" gives plain experts. Everything but packed experts is cast to `dtype`.
    At no time does more than one layer of unpacked experts exist beside the result. `progress` is called after every
    layer. Raises CheckpointError naming file and tensor, UsageError for settings that do not fit the model.
    """
    check_choice("weights", weights or "w4", WEIGHT_FORMATS)
    if is_random(model):
        return random_checkpoint(model, weights, dtype, device, spec, progress)
    files = open_checkpoint(find_checkpoint(model), verify)
    spec = _choose_spec(files, weights or "w4", spec)
    config = files.config
    target = torch.device(device)
    layers = []
    for i in range(config.num_layers):
        layers.append(_read_layer(files, i, spec, dtype, target))
        if progress is not None:
            progress(i + 1, config.num_layers)
    shared = {key: files.read(name).to(target, dtype) for key, (name, _) in shared_tensors(config).items()}
    return Checkpoint(
        path=files.path,
        format=files.format,
        config=config,
        settings=files.settings,
        weights=Weights(shared.pop("embed"), layers, shared.pop("norm"), SelfConditioningWeights(**shared)),
        spec=spec,
        notes=files.notes,
    )


def _choose_spec(files: CheckpointFiles, weights: WeightFormat, wanted: QuantSpec | None) -> QuantSpec | None:
    """Group sizes of the experts to be loaded; None for plain ones."""
    if files.spec is not None:
        if weights == "bf16":
            raise CheckpointError(
                f"{files.path}: holds 4-bit experts only, BF16 ones cannot be recovered; load it with weights='w4' or "
                "give the BF16 checkpoint it was made from"
            )
        if wanted is not None and wanted != files.spec:
            raise UsageError(
                f"{files.path}: packed with {files.spec}, not {wanted}; quantise the BF16 checkpoint again"
            )
        return files.spec
    if weights == "bf16":
        return None
    spec = wanted or QuantSpec()
    spec.check(files.config)
    return spec


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer and chat template of a checkpoint directory. Raises CheckpointError; never runs code from it."""
    from transformers import AutoTokenizer

    if not (path / "tokenizer.json").is_file() and not (path / "tokenizer.model").is_file():
        raise CheckpointError(
            f"{path / 'tokenizer.json'}: file is missing; copy the tokenizer files of the original here"
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as e:  # the tokenizers library raises bare Exceptions
        raise CheckpointError(f"{path}: the tokenizer cannot be loaded ({e})") from e
    return tokenizer


def _read_layer(
    files: CheckpointFiles, index: int, spec: QuantSpec | None, dtype: torch.dtype, device: torch.device
) -> LayerWeights:
    plain: dict[str, torch.Tensor | None] = {"v_proj": None}
    for key, (name, _) in layer_tensors(files.config, index).items():
        plain[key] = files.read(name).to(device, dtype)
    return LayerWeights(**plain, experts=read_experts(files, index, spec, dtype, device))  # type: ignore[arg-type]


def read_experts(
    files: CheckpointFiles, index: int, spec: QuantSpec | None, dtype: torch.dtype, device: torch.device
) -> DenseExperts | PackedExperts:
    """A layer's experts on `device`: as they are packed, else packed in groups of `spec`, or plain ones in `dtype`."""
    if files.format == "compressed-tensors":
        symmetric = compressed_tensors.tensor_name(index, 0, "gate_proj", "zero_point") not in files.text
        packed = compressed_tensors.read_experts(files.read, files.config, index, symmetric, str(files.path))
        return PackedExperts(*(tensor.to(device) for _, tensor in iter_tensors(packed)))
    if files.spec is not None:
        return PackedExperts(*(files.read(packed_name(index, name)).to(device) for name in dg_w4a16.PACKED_NAMES))
    names = expert_names(index)
    if spec is None:
        return DenseExperts(*(files.read(name).to(device, dtype) for name in names))
    gate_up, down = map(files.read, names)
    return quantize_experts(gate_up, down, spec, where=expert_place(files, index), device=device)


def expert_place(files: CheckpointFiles, layer: int) -> str:
    """File and common name of a layer's unpacked experts, for error messages."""
    gate_up, _ = expert_names(layer)
    return f"{files.text[gate_up][0].file}: tensor {gate_up.removesuffix('.gate_up_proj')}"
