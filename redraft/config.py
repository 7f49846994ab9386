"""Every setting Redraft has: frozen, read from files or keywords, validated here and nowhere else."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Self, get_args

from redraft.errors import CheckpointError, UsageError

Tier = Literal["off", "bitexact", "turbo"]
WeightFormat = Literal["w4", "bf16"]
LayerKind = Literal["sliding", "full"]

TIERS: tuple[Tier, ...] = get_args(Tier)
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
SEED_LIMIT = 2**63
COUNT_LIMIT = 2**31  # counts are 32-bit integers on a device


@dataclass(frozen=True)
class LayerConfig:
    """Attention geometry of one layer. `kind` full attends to the whole prefix and has V = v_norm(k_proj(x))."""

    kind: LayerKind
    head_dim: int
    num_kv_heads: int
    rope_theta: float
    partial_rotary_factor: float  # share of the head dim that is rotated; the rest has frequency zero


@dataclass(frozen=True)
class ModelConfig:
    """The text network of a DiffusionGemma checkpoint, read from its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # dense (shared) MLP
    num_heads: int
    layers: tuple[LayerConfig, ...]
    sliding_window: int
    num_experts: int
    top_k_experts: int
    moe_intermediate_size: int
    canvas_length: int
    max_position_embeddings: int
    rms_norm_eps: float
    final_logit_softcap: float
    pad_token_id: int
    bos_token_id: int | None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> Self:
        """Read transformers' config.json, of any version since 5.12. Raises CheckpointError naming the field."""
        if raw.get("model_type") != "diffusion_gemma":
            raise CheckpointError(
                f"{where}: model_type is {raw.get('model_type')!r}, expected 'diffusion_gemma'; "
                "Redraft runs DiffusionGemma checkpoints only"
            )
        text = raw.get("text_config")
        if not isinstance(text, dict):
            raise CheckpointError(f"{where}: text_config is missing")
        try:
            return cls._from_text(text, raw)
        except KeyError as e:
            raise CheckpointError(f"{where}: text_config.{e.args[0]} is missing") from None
        except (TypeError, ValueError) as e:
            raise CheckpointError(f"{where}: {e}") from None

    @classmethod
    def _from_text(cls, text: Mapping[str, Any], raw: Mapping[str, Any]) -> Self:
        for key, expected in (("hidden_activation", "gelu_pytorch_tanh"), ("attention_bias", False)):
            if text.get(key, expected) != expected:
                raise ValueError(f"text_config.{key} is {text[key]!r}; only {expected!r} is supported")
        if text.get("use_bidirectional_attention") == "all":
            raise ValueError("text_config.use_bidirectional_attention 'all' is not supported: the encoder is causal")
        if not raw.get("tie_word_embeddings", True):
            raise ValueError("tie_word_embeddings is false; Redraft needs the encoder, decoder and head tied")
        config = cls(
            vocab_size=_whole(text, "vocab_size"), hidden_size=_whole(text, "hidden_size"),
            intermediate_size=_whole(text, "intermediate_size"), num_heads=_whole(text, "num_attention_heads"),
            layers=_layer_configs(text), sliding_window=_whole(text, "sliding_window"),
            num_experts=_whole(text, "num_experts"), top_k_experts=_whole(text, "top_k_experts"),
            moe_intermediate_size=_whole(text, "moe_intermediate_size"),
            canvas_length=int(raw.get("canvas_length") or 256),
            max_position_embeddings=int(text.get("max_position_embeddings", 131_072)),
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            final_logit_softcap=float(text.get("final_logit_softcapping", 30.0)),
            pad_token_id=int(text.get("pad_token_id") or 0),
            bos_token_id=text.get("bos_token_id", 2),
        )  # fmt: skip
        config._validate()
        return config

    def _validate(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.type in (int, float) and f.name != "pad_token_id" and value <= 0:
                raise ValueError(f"{f.name} is {value}, expected a positive number")
        if self.top_k_experts > self.num_experts:
            raise ValueError(f"top_k_experts is {self.top_k_experts} with only {self.num_experts} experts")
        if self.sliding_window < 2:
            raise ValueError(f"sliding_window is {self.sliding_window}, expected at least 2")
        for i, layer in enumerate(self.layers):
            if self.num_heads % layer.num_kv_heads:
                raise ValueError(f"layer {i}: {self.num_heads} heads do not share {layer.num_kv_heads} KV heads evenly")
            if layer.head_dim % 2:
                raise ValueError(f"layer {i}: head_dim {layer.head_dim} is odd")

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def _whole(fields: Mapping[str, Any], key: str) -> int:
    value = fields[key]
    if not is_whole(value):
        raise ValueError(f"text_config.{key} is {value!r}, expected a whole number")
    return value


def _layer_configs(text: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    """Per-layer geometry from either spelling: `per_layer_config`, or the older `global_head_dim` pair."""
    count = _whole(text, "num_hidden_layers")
    types = text.get("layer_types") or ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(count)]
    if len(types) != count:
        raise ValueError(f"text_config.layer_types names {len(types)} layers, num_hidden_layers is {count}")
    types = [*types[:-1], "full_attention"]  # transformers forces the last layer to full attention
    default = {name: _whole(text, name) for name in ("head_dim", "num_key_value_heads")}
    kv_heads = text.get("num_global_key_value_heads") or default["num_key_value_heads"]
    full_default = {"head_dim": text.get("global_head_dim") or 512, "num_key_value_heads": kv_heads}
    # Keys are layer types or layer numbers, which transformers pads with zeros from ten layers on.
    overrides = {int(k) if str(k).isdigit() else k: v for k, v in (text.get("per_layer_config") or {}).items()}
    ropes = text.get("rope_parameters") or {}
    layers = []
    for i, name in enumerate(types):
        if name not in ("sliding_attention", "full_attention"):
            raise ValueError(f"text_config.layer_types[{i}] is {name!r}, expected sliding_attention or full_attention")
        full = name == "full_attention"
        own = overrides.get(i) or overrides.get(name) or {}
        base = {**(full_default if full and not overrides else default), **own}
        heads = _whole(base, "head_dim"), _whole(base, "num_key_value_heads")
        layers.append(LayerConfig("full" if full else "sliding", *heads, *_rope(ropes.get(name), full)))
    return tuple(layers)


def _rope(params: Mapping[str, Any] | None, full: bool) -> tuple[float, float]:
    """(theta, rotated share): plain rope on sliding layers, proportional rope on full ones."""
    expected = "proportional" if full else "default"
    params = params or {"rope_type": expected}
    if params.get("rope_type", expected) != expected or params.get("factor", 1.0) != 1.0:
        raise ValueError(f"rope_parameters {dict(params)} are not supported: expected type {expected!r}, factor 1")
    partial = params.get("partial_rotary_factor", 0.25 if full else 1.0)
    if not full and partial != 1.0:
        raise ValueError(f"sliding layers must rotate the whole head, found partial_rotary_factor {partial}")
    return float(params.get("rope_theta", 1e6 if full else 1e4)), float(partial)


@dataclass(frozen=True)
class QuantSpec:
    """How experts are packed: group sizes along the input dimension of each projection.

    128 for gate/up and 64 for down are what `dg-w4a16-v1` publishes (704 is not divisible by 128).
    """

    group_gate_up: int = 128
    group_down: int = 64

    def __post_init__(self) -> None:
        for name, group in (("group_gate_up", self.group_gate_up), ("group_down", self.group_down)):
            if not is_whole(group) or group < 2 or group % 2:
                raise UsageError(f"{name} is {group!r}, expected an even number of at least 2")
            object.__setattr__(self, name, int(group))

    def check(self, config: ModelConfig) -> None:
        """Raise UsageError with the numbers when a group size does not divide its dimension."""
        for name, size in (("group_gate_up", "hidden_size"), ("group_down", "moe_intermediate_size")):
            group, dim = getattr(self, name), getattr(config, size)
            if rest := dim % group:
                raise UsageError(
                    f"{name} {group} does not divide {size} {dim} (remainder {rest}); choose a divisor of {dim}"
                )


@dataclass(frozen=True)
class DecodeSettings:
    """One request's decoding settings. Defaults are DiffusionGemma's published generation config."""

    max_new_tokens: int = 256
    max_denoising_steps: int = 48
    entropy_bound: float = 0.1  # nats
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1  # equal argmax canvases before the current one; 0 asks for none
    confidence_threshold: float = 0.005  # nats, mean entropy over the canvas
    eos_token_ids: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("max_denoising_steps", 1), ("stability_threshold", 0)):
            object.__setattr__(self, name, require_int(name, getattr(self, name), least))
        for name in ("entropy_bound", "confidence_threshold", "t_max", "t_min"):
            object.__setattr__(self, name, _require_positive(name, getattr(self, name)))
        object.__setattr__(self, "eos_token_ids", _token_ids("eos_token_ids", self.eos_token_ids))
        if self.t_max < self.t_min:
            raise UsageError(f"t_max {self.t_max} is below t_min {self.t_min}")

    def replace(self, **changes: Any) -> Self:
        """A copy with `changes`; None keeps the present value. Raises UsageError on an unknown name or bad value."""
        known = {f.name for f in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise UsageError(f"unknown setting {name!r}; settings are {', '.join(sorted(known))}")
        return dataclasses.replace(self, **{k: v for k, v in changes.items() if v is not None})

    @classmethod
    def from_generation_config(cls, raw: Mapping[str, Any], where: str = "generation_config.json") -> Self:
        """Read transformers' generation_config.json; absent or null fields keep the published defaults.

        Without an end token there no answer ends early: transformers knows none then either.
        """
        eos = raw.get("eos_token_id")
        names = (
            "max_new_tokens", "max_denoising_steps", "t_min", "t_max", "stability_threshold", "confidence_threshold"
        )  # fmt: skip
        changes: dict[str, Any] = {name: raw.get(name) for name in names}
        changes["entropy_bound"] = (raw.get("sampler_config") or {}).get("entropy_bound")
        changes["eos_token_ids"] = () if eos is None else eos
        try:
            return cls().replace(**changes)
        except (UsageError, TypeError) as e:
            raise CheckpointError(f"{where}: {e}") from None


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number of any integer type, numpy's too; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def require_int(name: str, value: Any, least: int) -> int:
    """The value, if it is a whole number from `least` to 2^31 - 1; UsageError otherwise."""
    if not is_whole(value) or value < least:
        raise UsageError(f"{name} is {value!r}, expected a whole number of at least {least}")
    if value >= COUNT_LIMIT:
        raise UsageError(f"{name} is {value}, expected at most {COUNT_LIMIT - 1}")
    return int(value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """One token id or several as a tuple; UsageError naming the setting otherwise."""
    ids = (value,) if is_whole(value) else value
    if not isinstance(ids, list | tuple):
        raise UsageError(f"{name} is {value!r}, expected token ids")
    return tuple(require_int(name, token, 0) for token in ids)


def _require_positive(name: str, value: Any) -> float:
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise UsageError(f"{name} is {value!r}, expected a number above 0")
    return number


def check_seed(seed: Any) -> int:
    """The seed as given, if it is a whole number from 0 to 2^63 - 1; UsageError otherwise."""
    if not is_whole(seed) or not 0 <= seed < SEED_LIMIT:
        raise UsageError(f"seed is {seed!r}, expected a whole number from 0 to 2^63 - 1")
    return int(seed)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise UsageError unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise UsageError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming the file when it is missing or malformed."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: file is missing") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise CheckpointError(f"{path}: cannot be read as JSON ({e})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw
