"""Find, check and read checkpoints: transformers' BF16 directories and packed `dg-w4a16-v1` directories.

Everything that can be known from names and headers is checked before a byte of weights is read. Tensors are then read
layer by layer through a memory map and copied, so that one layer at most exists twice. Pickled files are never opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from safetensors import SafetensorError, safe_open

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
from redraft.quant import dg_w4a16
from redraft.quant.rtn import quantize_experts
from redraft.weights import DenseExperts, LayerWeights, PackedExperts, SelfConditioningWeights, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Shape = tuple[int, ...]
Progress = Callable[[int, int], None]  # (steps done, steps in all)
StoredFormat = Literal["bf16", "dg-w4a16-v1"]

DEMO = Path(__file__).parent / "demo" / "checkpoint"
INDEX = "model.safetensors.index.json"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")

DECODER = "model.decoder."
ENCODER = "model.encoder.language_model."
VISION = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")

_FLOATS = ("BF16", "F16", "F32")
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_PACKED = re.compile(rf"(?:.*\.)?layers\.(\d+)\.experts\.({'|'.join(dg_w4a16.PACKED_NAMES)})")
_SCALAR = re.compile(r"layers\.\d+\.layer_scalar")
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


def canonical_name(name: str) -> str:
    """The one name under which Redraft knows a stored tensor.

    Tied names fall together under `model.decoder.`: the encoder's copies, the head (`lm_head.weight`, the embedding
    again), names without the leading `model.`, and packed experts under any prefix. Layer scalars of the encoder are
    not tied and keep theirs. Unknown names come back unchanged.
    """
    if packed := _PACKED.fullmatch(name):
        return f"{DECODER}layers.{int(packed[1])}.experts.{packed[2]}"
    if name in ("lm_head.weight", "model.lm_head.weight"):
        return f"{DECODER}embed_tokens.weight"
    full = f"model.{name}" if name.startswith(("decoder.", "encoder.")) else name
    rest = full.removeprefix(ENCODER)
    return DECODER + rest if rest != full and not _SCALAR.fullmatch(rest) else full


def part_of(name: str) -> str:
    """The part of the network a canonical name belongs to, as reports call it."""
    for part, pattern in _PARTS:
        if pattern.search(name):
            return part
    return "other"


_PARTS = [
    (part, re.compile(pattern))
    for part, pattern in (
        ("vision", r"^model\.encoder\.(vision_tower|embed_vision)\."),
        ("embedding", r"^model\.decoder\.embed_tokens\."),
        ("self-conditioning", r"^model\.decoder\.self_conditioning\."),
        ("experts", r"^model\.decoder\.layers\.\d+\.experts\."),
        ("router", r"^model\.decoder\.layers\.\d+\.router\."),
        ("norms", r"^model\.decoder\.(layers\.\d+\.(self_attn\.)?\w*norm\w*|norm)\.|\.layer_scalar$"),
        ("attention", r"^model\.decoder\.layers\.\d+\.self_attn\."),
        ("dense MLP", r"^model\.decoder\.layers\.\d+\.mlp\."),
    )
]
PARTS = ("embedding", "attention", "dense MLP", "experts", "router", "norms", "self-conditioning", "vision", "other")


def _layer_tensors(config: ModelConfig, index: int) -> dict[str, tuple[str, Shape]]:
    """Field of LayerWeights -> (canonical name, shape), without the experts."""
    layer, h, wide = config.layers[index], config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    table: dict[str, tuple[str, Shape]] = {
        **{name: (f"{name}.weight", (h,)) for name in _LAYER_NORMS},
        "q_proj": ("self_attn.q_proj.weight", (q, h)),
        "k_proj": ("self_attn.k_proj.weight", (kv, h)),
        "v_proj": ("self_attn.v_proj.weight", (kv, h)),
        "o_proj": ("self_attn.o_proj.weight", (h, q)),
        "q_norm": ("self_attn.q_norm.weight", (layer.head_dim,)),
        "k_norm": ("self_attn.k_norm.weight", (layer.head_dim,)),
        "gate_proj": ("mlp.gate_proj.weight", (wide, h)),
        "up_proj": ("mlp.up_proj.weight", (wide, h)),
        "down_proj": ("mlp.down_proj.weight", (h, wide)),
        "router_proj": ("router.proj.weight", (config.num_experts, h)),
        "router_scale": ("router.scale", (h,)),
        "per_expert_scale": ("router.per_expert_scale", (config.num_experts,)),
        "decoder_scalar": ("layer_scalar", (1,)),
    }
    if layer.kind == "full":
        del table["v_proj"]  # V is made from k_proj's output
    named = {key: (f"{DECODER}layers.{index}.{name}", shape) for key, (name, shape) in table.items()}
    return {**named, "encoder_scalar": (f"{ENCODER}layers.{index}.layer_scalar", (1,))}


_LAYER_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)


def _shared_tensors(config: ModelConfig) -> dict[str, tuple[str, Shape]]:
    """Field of Weights or SelfConditioningWeights -> (canonical name, shape)."""
    h, wide = config.hidden_size, config.intermediate_size
    inner = f"{DECODER}self_conditioning"
    return {
        "embed": (f"{DECODER}embed_tokens.weight", (config.vocab_size, h)),
        "norm": (f"{DECODER}norm.weight", (h,)),
        "pre_norm": (f"{inner}.pre_norm.weight", (h,)),
        "gate_proj": (f"{inner}.gate_proj.weight", (wide, h)),
        "up_proj": (f"{inner}.up_proj.weight", (wide, h)),
        "down_proj": (f"{inner}.down_proj.weight", (h, wide)),
    }


def expert_names(layer: int) -> tuple[str, str]:
    """Canonical names of one layer's unpacked experts: gate_up [E, 2I, H] and down [E, H, I]."""
    prefix = f"{DECODER}layers.{layer}.experts"
    return f"{prefix}.gate_up_proj", f"{prefix}.down_proj"


def packed_name(layer: int, name: str) -> str:
    """Canonical name of one of a layer's six packed tensors."""
    return f"{DECODER}layers.{layer}.experts.{name}"


def _expected(config: ModelConfig, spec: QuantSpec | None) -> dict[str, tuple[tuple[str, ...], Shape]]:
    """Canonical name -> (dtypes accepted, shape) of the whole text network; experts packed when `spec` is given."""
    tables = chain([_shared_tensors(config)], (_layer_tensors(config, i) for i in range(config.num_layers)))
    expected: dict[str, tuple[tuple[str, ...], Shape]] = {
        name: (_FLOATS, shape) for table in tables for name, shape in table.values()
    }
    e, h, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    for i in range(config.num_layers):
        if spec is None:
            gate_up, down = expert_names(i)
            expected[gate_up] = (_FLOATS, (e, 2 * inner, h))
            expected[down] = (_FLOATS, (e, h, inner))
        else:
            for name, (dtype, shape) in dg_w4a16.packed_shapes(config, spec).items():
                expected[packed_name(i, name)] = ((dtype,), shape)
    return expected


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as a file's header describes it. `dtype` is safetensors' spelling."""

    name: str
    file: Path
    dtype: str
    shape: Shape

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * _ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.name}"


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

    def reader(self) -> Reader:
        """Open for reading; tensors are views of the files and must be copied before the reader closes."""
        return Reader(self)


def open_checkpoint(path: Path, verify: bool = False) -> CheckpointFiles:
    """Read configuration and headers of a local directory and check them against each other.

    `verify` also compares every tensor with the sha256 in manifest.json, which only directories written by
    `redraft quantize` have. Raises CheckpointError naming the file and the tensor.
    """
    raw = read_json(path / "config.json")
    config = ModelConfig.from_dict(raw, str(path / "config.json"))
    packed = (path / dg_w4a16.META).exists() or any(path.glob(dg_w4a16.EXPERT_FILES))
    meta = dg_w4a16.read_meta(path) if packed else {}
    _refuse_other_quantisation(path, raw)
    infos = [info for file in _weight_files(path, packed) for info in read_header(file)]
    text, extras = _sort_tensors(infos)
    spec = _spec_of(path, meta, config, text) if packed else None
    _check_tensors(path, config, text, spec)
    settings, notes = _settings(path)
    files = CheckpointFiles(
        path=path,
        format="dg-w4a16-v1" if packed else "bf16",
        config=config,
        settings=settings,
        spec=spec,
        text=text,
        extras=extras,
        notes=_notes(extras) + notes,
    )
    _check_manifest(files, infos, verify)
    return files


def _refuse_other_quantisation(path: Path, raw: dict[str, Any]) -> None:
    other = raw.get("quantization_config")
    if other:
        method = other.get("quant_method") if isinstance(other, dict) else other
        raise CheckpointError(
            f"{path / 'config.json'}: quantised with {method!r}, which Redraft does not read; "
            f"start from the BF16 checkpoint or one in {dg_w4a16.FORMAT}"
        )


def _weight_files(path: Path, packed: bool) -> list[Path]:
    experts = sorted(path.glob(dg_w4a16.EXPERT_FILES)) if packed else []
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors", *experts]
    if (path / INDEX).is_file():
        return [*_indexed_files(path), *experts]
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


def read_header(file: Path) -> list[TensorInfo]:
    """Names, dtypes and shapes of a safetensors file. Raises CheckpointError when it is damaged or cut short."""
    try:
        with safe_open(file, framework="pt") as f:
            slices = ((name, f.get_slice(name)) for name in f.keys())  # noqa: SIM118 - not a dict
            infos = [TensorInfo(name, file, s.get_dtype(), tuple(s.get_shape())) for name, s in slices]
    except (SafetensorError, OSError) as e:
        cut = _first_cut_tensor(file)
        place = f"cut short within tensor {cut}" if cut else "damaged, its header cannot be read"
        raise CheckpointError(f"{file}: {place} ({e})") from None
    for info in infos:
        if info.dtype not in _ITEM_BYTES:
            raise CheckpointError(f"{info} has dtype {info.dtype}, which Redraft does not know")
    return infos


def _first_cut_tensor(file: Path) -> str | None:
    """The first tensor that reaches beyond the end of a file which safetensors refused, if its header is whole."""
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(min(length, size)))
        spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
        return min((start, name) for name, (start, end) in spans.items() if 8 + length + end > size)[1]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


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


def _spec_of(path: Path, meta: dict[str, Any], config: ModelConfig, text: dict[str, list[TensorInfo]]) -> QuantSpec:
    shapes = []
    for name in (packed_name(0, "gu_s"), packed_name(0, "dn_s")):
        if name not in text:
            raise CheckpointError(f"{path / dg_w4a16.expert_file(0)}: tensor {name} is missing")
        shapes.append(text[name][0].shape)
    return dg_w4a16.infer_spec(path, meta, config, *shapes)


def _check_tensors(path: Path, config: ModelConfig, text: dict[str, list[TensorInfo]], spec: QuantSpec | None) -> None:
    expected = _expected(config, spec)
    missing = [name for name in expected if name not in text]
    if missing:
        packed = _PACKED.fullmatch(missing[0])
        place = path / dg_w4a16.expert_file(int(packed[1])) if packed else path
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
    if files.format == "bf16" or not manifest_file.exists():
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
        if "sha256" in entry and dg_w4a16.file_sha256(files.path / name) != entry["sha256"]:
            raise CheckpointError(
                f"{files.path / name}: sha256 differs from {dg_w4a16.MANIFEST}; it was changed or damaged"
            )
    for info in infos:
        with files.reader() as read:
            digest = dg_w4a16.tensor_sha256(read.stored(info))
        if digest != manifest["tensors"][info.name]["sha256"]:
            raise CheckpointError(f"{info} has another sha256 than {dg_w4a16.MANIFEST} recorded; the file is damaged")


class Reader:
    """Reads tensors by canonical name. A context manager: files stay mapped until it closes, so keep it short."""

    def __init__(self, files: CheckpointFiles):
        self._files = files
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open.clear()
        self._stack.close()

    def __call__(self, name: str) -> torch.Tensor:
        """A CPU view of the tensor, dtype as stored. Copies saved under a tied name must be equal bit for bit."""
        if name in self._files.extras:
            return self.stored(self._files.extras[name])
        first, *others = self._files.text[name]
        tensor = self.stored(first)
        for other in others:
            twin = self.stored(other)
            if tensor.dtype != twin.dtype or not torch.equal(*map(dg_w4a16.tensor_bytes, (tensor, twin))):
                raise CheckpointError(
                    f"{other} differs from {first.name}, though the network ties them; Redraft needs one"
                )
        return tensor

    def stored(self, info: TensorInfo) -> torch.Tensor:
        """A CPU view of one stored tensor."""
        try:
            if info.file not in self._open:
                self._open[info.file] = self._stack.enter_context(safe_open(info.file, framework="pt"))
            tensor: torch.Tensor = self._open[info.file].get_tensor(info.name)
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"{info} cannot be read ({e})") from None
        return tensor


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
    """Load a model for `find_checkpoint`'s argument.

    weights "w4" (also None) gives packed experts, quantising a BF16 checkpoint layer by layer on `device` with `spec`
    (None: the published group sizes); "bf16" gives plain experts. Everything but packed experts is cast to `dtype`.
    At no time does more than one layer of unpacked experts exist beside the result. `progress` is called after every
    layer. Raises CheckpointError naming file and tensor, UsageError for settings that do not fit the model.
    """
    check_choice("weights", weights or "w4", WEIGHT_FORMATS)
    files = open_checkpoint(find_checkpoint(model), verify)
    spec = _choose_spec(files, weights or "w4", spec)
    config = files.config
    target = torch.device(device)
    layers = []
    for i in range(config.num_layers):
        with files.reader() as read:
            layers.append(_read_layer(read, files, i, spec, dtype, target))
        if progress is not None:
            progress(i + 1, config.num_layers)
    with files.reader() as read:
        shared = {key: _copy(read(name), dtype, target) for key, (name, _) in _shared_tensors(config).items()}
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


def _copy(view: torch.Tensor, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    # Always a copy: a view would follow whatever is later done to the file, and end the process if it is cut short.
    return view.to(device=device, dtype=dtype, copy=True)


def _read_layer(
    read: Reader, files: CheckpointFiles, index: int, spec: QuantSpec | None, dtype: torch.dtype, device: torch.device
) -> LayerWeights:
    plain: dict[str, torch.Tensor | None] = {"v_proj": None}
    for key, (name, _) in _layer_tensors(files.config, index).items():
        plain[key] = _copy(read(name), dtype, device)
    experts = _read_experts(read, files, index, spec, dtype, device)
    return LayerWeights(**plain, experts=experts)  # type: ignore[arg-type]


def _read_experts(
    read: Reader, files: CheckpointFiles, index: int, spec: QuantSpec | None, dtype: torch.dtype, device: torch.device
) -> DenseExperts | PackedExperts:
    if files.spec is not None:
        return PackedExperts(*(_copy(read(packed_name(index, n)), None, device) for n in dg_w4a16.PACKED_NAMES))
    gate_up, down = (read(name) for name in expert_names(index))
    if spec is None:
        return DenseExperts(_copy(gate_up, dtype, device), _copy(down, dtype, device))
    return quantize_experts(gate_up, down, spec, where=expert_place(files, index), device=device)


def expert_place(files: CheckpointFiles, layer: int) -> str:
    """File and common name of a layer's unpacked experts, for error messages."""
    gate_up, _ = expert_names(layer)
    return f"{files.text[gate_up][0].file}: tensor {gate_up.removesuffix('.gate_up_proj')}"
