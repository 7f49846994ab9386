"""The file format compressed-tensors `pack-quantized`, 4 bits in groups: names, configuration, packing, reading.

vLLM, llm-compressor and transformers exchange it. Every expert's projection is a Linear of its own, N rows of K
weights, below `<...>layers.L.experts.E.{gate,up,down}_proj.`:

    weight_packed      int32 [N, K/8]   nibble k % 8 of word k // 8 is q[k], in 0..15
    weight_scale       BF16  [N, K/G]   fp16 and fp32 are read too
    weight_zero_point  int32 [N/8, K/G] asymmetric only: nibble n % 8 of word n // 8 is row n's z, in 0..15
    weight_shape       int64 [2]        N, K

A weight is (q - z) * s; without zero points z is 8. (The library counts q and z from -8 and stores them plus 8.)

What Redraft writes has BF16 scales, because engines that run in BF16 round others when they load them, and only such
that fp16 holds as well, which is what `PackedExperts` stores: the weights are the same everywhere. Scales are rounded
to nearest and q and z computed from the rounded ones. Measured on 1024 x 2816 BF16 matrices (SQNR in dB, groups of
64 / 32; `dg-w4a16-v1` with its real zero points: Gaussian 20.95 / 22.12, Student-t with 4 degrees 18.58 / 20.58):

    asymmetric, z = round(-lo / s), s = (hi - lo) / 15    20.82 / 21.85    18.48 / 20.31
    asymmetric, s widened until no end saturates          20.58 / 21.67    18.20 / 20.07
    symmetric, s = max(hi / 7, -lo / 8)                   19.81 / 20.73    16.42 / 18.14
    symmetric, s = max(hi, -lo) / 7.5                     19.77 / 20.46    16.30 / 17.82
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from redraft.config import ModelConfig, QuantSpec
from redraft.errors import CheckpointError, UsageError
from redraft.kernels.packing import pack_nibbles, unpack_nibbles
from redraft.network.weights import DenseExperts, PackedExperts
from redraft.store.format import Entry, Format, Read
from redraft.store.names import FLOATS, packed_name

FORMAT = "compressed-tensors"
PACKING = "pack-quantized"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SMALLEST_SCALE = 2.0**-17  # from here on fp16 holds every BF16 number
LARGEST_SCALE = 65280.0  # the largest BF16 number that fp16 holds
# Every Linear that is not an expert, on both sides and in the vision tower.
IGNORE = (
    "lm_head", r"re:.*\.self_attn\.[qkvo]_proj.*", r"re:.*\.mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*\.router\.proj$", r"re:.*\.self_conditioning\..*", r"re:.*vision_tower\..*", r"re:.*embed_vision\..*",
)  # fmt: skip
# What a group of the configuration must say; a key that is absent means the first value.
_WEIGHTS = {
    "num_bits": (4,), "type": ("int",), "strategy": ("group",), "actorder": (None, "weight", "static"),
    "dynamic": (False,), "block_structure": (None,),
}  # fmt: skip
_Matrix = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # uint8 [N, K/2], scale and zero fp16 [N, K/G]


@dataclass(frozen=True)
class CompressedTensors(Format):
    """Packed experts, a Linear each: weights a group, and whether zero points are absent (symmetric)."""

    name = FORMAT

    group: int
    symmetric: bool

    @property
    def spec(self) -> QuantSpec:  # type: ignore[override]
        return QuantSpec(self.group, self.group)

    @classmethod
    def describe(cls, path: Path, quantization: Mapping[str, Any] | None, config: ModelConfig) -> Self | None:
        if quantization is None or quantization["quant_method"] != FORMAT:
            return None
        where = str(path / "config.json")
        found = cls(*_read_scheme(where, quantization))
        try:
            found.check(config)
        except UsageError as e:
            raise CheckpointError(f"{where}: {e}") from None
        return found

    def expected(self, config: ModelConfig, layer: int) -> dict[str, Entry]:
        expected: dict[str, Entry] = {}
        for projection in PROJECTIONS:
            rows, width = matrix_shape(config, projection)
            keys: dict[str, Entry] = {
                "packed": (("I32",), (rows, width // 8)),
                "scale": (FLOATS, (rows, width // self.group)),
                "shape": (("I64", "I32"), (2,)),
            }
            if not self.symmetric:
                keys["zero_point"] = (("I32",), (rows // 8, width // self.group))
            for expert in range(config.num_experts):
                expected |= {tensor_name(layer, expert, projection, key): entry for key, entry in keys.items()}
        return expected

    def read_layer(self, read: Read, config: ModelConfig, layer: int, where: str) -> PackedExperts:
        """The same weights bit for bit.

        Raises CheckpointError also when fp16, in which PackedExperts stores scales, does not hold a scale exactly, or
        `weight_shape` contradicts config.json.
        """
        keys = ("packed", "scale", "shape") if self.symmetric else ("packed", "scale", "shape", "zero_point")

        def matrix(expert: int, projection: str) -> _Matrix:
            stored = {key: read(tensor_name(layer, expert, projection, key)) for key in keys}
            try:
                return _read_matrix(stored, matrix_shape(config, projection))
            except ValueError as e:
                raise CheckpointError(f"{where}: tensor {tensor_name(layer, expert, projection, str(e))}") from None

        def stacked(projection: str) -> list[torch.Tensor]:
            matrices = [matrix(expert, projection) for expert in range(config.num_experts)]
            return [torch.stack(tensors) for tensors in zip(*matrices, strict=True)]

        gate, up, down = map(stacked, PROJECTIONS)
        return PackedExperts(*(torch.cat(pair, 1) for pair in zip(gate, up, strict=True)), *down)

    def write_layer(
        self, dense: DenseExperts, layer: int, where: str, device: torch.device | str
    ) -> dict[str, torch.Tensor]:
        """Unpacked experts rounded on `device` -> stored tensors by canonical name, on the CPU. Raises as `pack`."""
        tensors: dict[str, torch.Tensor] = {}
        for expert in range(dense.down.shape[0]):
            matrices = (*dense.gate_up[expert].chunk(2), dense.down[expert])
            for projection, matrix in zip(PROJECTIONS, matrices, strict=True):
                packed = pack(matrix.to(device), self, f"{where}[{expert}].{projection}")
                tensors |= {tensor_name(layer, expert, projection, key): t.cpu() for key, t in packed.items()}
        return tensors

    def check(self, config: ModelConfig) -> None:
        for name in ("hidden_size", "moe_intermediate_size"):
            if getattr(config, name) % self.group:
                raise UsageError(f"groups of {self.group} do not divide {name} {getattr(config, name)}")

    def quantization_config(self) -> dict[str, Any]:
        weights = {
            "num_bits": 4, "type": "int", "symmetric": self.symmetric, "strategy": "group", "group_size": self.group,
            "dynamic": False, "actorder": None,
        }  # fmt: skip
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": FORMAT, "format": PACKING, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": list(IGNORE), "kv_cache_scheme": None,
        }  # fmt: skip


def _read_scheme(where: str, quantization: Mapping[str, Any]) -> tuple[int, bool]:
    """Group size and symmetry that a `quantization_config` describes.

    Raises CheckpointError naming `where` and the field that is not read.
    """

    def need(ok: bool, field: str, found: object, expected: str) -> None:
        if not ok:
            raise CheckpointError(f"{where}: quantization_config.{field} is {found!r}; Redraft reads {expected}")

    groups: Any = quantization.get("config_groups")
    need(isinstance(groups, Mapping) and len(groups) == 1, "config_groups", groups, "one group, the experts'")
    ((name, group),) = groups.items()
    place = f"config_groups.{name}"
    weights: Any = group.get("weights") if isinstance(group, Mapping) else None
    need(isinstance(weights, Mapping), place, group, "groups with weights")
    form = group.get("format") or quantization.get("format")
    need(form == PACKING, "format", form, f"{PACKING!r} only")
    for key in ("input_activations", "output_activations"):
        need(not group.get(key), f"{place}.{key}", group.get(key), "weights-only quantisation")
    for key, accepted in _WEIGHTS.items():
        found = weights.get(key, accepted[0])
        need(found in accepted, f"{place}.weights.{key}", found, " or ".join(map(repr, accepted)))
    size = weights.get("group_size")
    whole = isinstance(size, int) and size >= 8 and size % 8 == 0
    need(whole, f"{place}.weights.group_size", size, "multiples of 8")
    return size, bool(weights.get("symmetric", True))


def tensor_name(layer: int, expert: int, projection: str, key: str) -> str:
    """Canonical name of one stored tensor; key without the leading `weight_`."""
    return packed_name(layer, f"{expert}.{projection}.weight_{key}")


def matrix_shape(config: ModelConfig, projection: str) -> tuple[int, int]:
    """(rows, columns) of one expert's projection."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    return (hidden, inner) if projection == "down_proj" else (inner, hidden)


def pack(weight: torch.Tensor, scheme: CompressedTensors, where: str) -> dict[str, torch.Tensor]:
    """Round one matrix, any float dtype [N, K], to nearest and pack it: {packed, scale, shape[, zero_point]}.

    Raises CheckpointError naming `where` when a weight is not finite or too large for the scales.
    """
    w = weight.float().unflatten(-1, (-1, scheme.group))
    lo, hi = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
    # Tensors and not numbers, which CUDA would turn into products with inexact reciprocals.
    if scheme.symmetric:
        step = torch.maximum(hi / hi.new_tensor(7.0), -lo / lo.new_tensor(8.0))
    else:
        step = (hi - lo) / hi.new_tensor(15.0)
    if not bool((step <= LARGEST_SCALE).all()):
        bad = "not all finite" if not bool(torch.isfinite(weight).all()) else "too large for the scales of 4 bits"
        raise CheckpointError(f"{where}: its weights are {bad}")
    scale = step.clamp(min=SMALLEST_SCALE).to(torch.bfloat16)
    s = scale.float()
    zero = torch.full_like(s, 8.0) if scheme.symmetric else (-lo / s).round_().clamp_(0, 15)
    q = (w / s.unsqueeze(-1)).add_(zero.unsqueeze(-1)).round_().clamp_(0, 15)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    packed = {"packed": _words(q.flatten(-2).to(torch.uint8)), "scale": scale, "shape": shape}
    if not scheme.symmetric:
        packed["zero_point"] = _words(zero.T.to(torch.uint8)).T.contiguous()
    return packed


def _words(nibbles: torch.Tensor) -> torch.Tensor:
    """uint8 [R, K] of values 0..15 -> int32 [R, K/8]: a word's bytes, lowest first, are pairs of nibbles."""
    packed = pack_nibbles(nibbles)
    return packed.flatten().view(torch.int32).view(packed.shape[0], -1)


def _read_matrix(stored: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> _Matrix:
    """Nibbles, scales and zeros of one matrix. Raises ValueError that begins with the key at fault."""
    if tuple(stored["shape"].tolist()) != shape:
        raise ValueError(f"shape says {stored['shape'].tolist()}, config.json means {list(shape)}")
    scale = stored["scale"].half()
    lost = int(((scale.float() != stored["scale"].float()) | ~torch.isfinite(scale)).sum())
    if lost:
        raise ValueError(
            f"scale: fp16 does not hold {lost} of its {scale.numel()} scales exactly; export the BF16 checkpoint "
            "again, with scales in fp16, or in BF16 of at least 2^-17"
        )
    zero = torch.full_like(scale, 8.0)
    if "zero_point" in stored:
        zero = unpack_nibbles(stored["zero_point"].T.contiguous().view(torch.uint8)).T.half()
    return stored["packed"].view(torch.uint8), scale, zero
