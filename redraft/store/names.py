"""What a checkpoint's tensors are called and how they are shaped.

A canonical name is the one transformers saves the tensor under; tied names fall together under `model.decoder.`.
"""

import re

from redraft.config import ModelConfig

Shape = tuple[int, ...]

DECODER = "model.decoder."
ENCODER = "model.encoder.language_model."
VISION = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")

PACKED_NAMES = ("gu_q", "gu_s", "gu_z", "dn_q", "dn_s", "dn_z")  # the fields of PackedExperts, in `dg-w4a16-v1`
FLOATS = ("BF16", "F16", "F32")  # safetensors dtypes in which plain weights are read
_PACKED = re.compile(rf"(?:.*\.)?layers\.(\d+)\.experts\.({'|'.join(PACKED_NAMES)})")
_SCALAR = re.compile(r"layers\.\d+\.layer_scalar")


def canonical_name(name: str) -> str:
    """The one name under which Redraft knows a stored tensor.

    Tied names fall together under `model.decoder.`: the encoder's copies, the head (`lm_head.weight`, the embedding
    again), names without the leading `model.`, and packed experts under any prefix. Layer scalars of the encoder are
    not tied and keep theirs. Unknown names come back unchanged.
    """
    if packed := _PACKED.fullmatch(name):
        return packed_name(int(packed[1]), packed[2])
    if name in ("lm_head.weight", "model.lm_head.weight"):
        return f"{DECODER}embed_tokens.weight"
    full = full_name(name)
    rest = full.removeprefix(ENCODER)
    return DECODER + rest if rest != full and not _SCALAR.fullmatch(rest) else full


def full_name(name: str) -> str:
    """A name with the leading `model.` that some files and adapters leave out."""
    return f"model.{name}" if name.startswith(("decoder.", "encoder.")) else name


def part_of(name: str) -> str:
    """The part of the network a canonical name belongs to, as reports call it."""
    return next((part for part, pattern in _PATTERNS.items() if re.search(pattern, name)), "other")


_PATTERNS = {  # the first that is found; norms come before attention, which has some of them
    "vision": r"^model\.encoder\.(vision_tower|embed_vision)\.",
    "embedding": r"^model\.decoder\.embed_tokens\.",
    "self-conditioning": r"^model\.decoder\.self_conditioning\.",
    "experts": r"^model\.decoder\.layers\.\d+\.experts\.",
    "router": r"^model\.decoder\.layers\.\d+\.router\.",
    "norms": r"^model\.decoder\.(layers\.\d+\.(self_attn\.)?\w*norm\w*|norm)\.|\.layer_scalar$",
    "attention": r"^model\.decoder\.layers\.\d+\.self_attn\.",
    "dense MLP": r"^model\.decoder\.layers\.\d+\.mlp\.",
}
PARTS = ("embedding", "attention", "dense MLP", "experts", "router", "norms", "self-conditioning", "vision", "other")


def layer_tensors(config: ModelConfig, index: int) -> dict[str, tuple[str, Shape]]:
    """Field of LayerWeights -> (canonical name, shape), without the experts."""
    layer, h, d = config.layers[index], config.hidden_size, config.layers[index].head_dim
    q, kv, inner = config.num_heads * d, layer.num_kv_heads * d, f"{DECODER}layers.{index}"
    attention: dict[str, Shape] = {"q_proj": (q, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, q)}
    attention |= {"q_norm": (d,), "k_norm": (d,)}
    if layer.kind == "full":
        del attention["v_proj"]  # V is made from k_proj's output
    return {
        **{name: (f"{inner}.{name}.weight", (h,)) for name in _LAYER_NORMS},
        **{name: (f"{inner}.self_attn.{name}.weight", shape) for name, shape in attention.items()},
        **_mlp_tensors(config, f"{inner}.mlp"),
        "router_proj": (f"{inner}.router.proj.weight", (config.num_experts, h)),
        "router_scale": (f"{inner}.router.scale", (h,)),
        "per_expert_scale": (f"{inner}.router.per_expert_scale", (config.num_experts,)),
        "decoder_scalar": (f"{inner}.layer_scalar", (1,)),
        "encoder_scalar": (f"{ENCODER}layers.{index}.layer_scalar", (1,)),
    }


_LAYER_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2",
)  # fmt: skip


def shared_tensors(config: ModelConfig) -> dict[str, tuple[str, Shape]]:
    """Field of Weights or SelfConditioningWeights -> (canonical name, shape)."""
    h, inner = config.hidden_size, f"{DECODER}self_conditioning"
    return {
        "embed": (f"{DECODER}embed_tokens.weight", (config.vocab_size, h)),
        "norm": (f"{DECODER}norm.weight", (h,)),
        "pre_norm": (f"{inner}.pre_norm.weight", (h,)),
        **_mlp_tensors(config, inner),
    }


def _mlp_tensors(config: ModelConfig, prefix: str) -> dict[str, tuple[str, Shape]]:
    h, wide = config.hidden_size, config.intermediate_size
    shapes = {"gate_proj": (wide, h), "up_proj": (wide, h), "down_proj": (h, wide)}
    return {name: (f"{prefix}.{name}.weight", shape) for name, shape in shapes.items()}


def expert_names(layer: int) -> tuple[str, str]:
    """Canonical names of one layer's unpacked experts: gate_up [E, 2I, H] and down [E, H, I]."""
    return packed_name(layer, "gate_up_proj"), packed_name(layer, "down_proj")


def packed_layer(name: str) -> int | None:
    """The layer a packed expert tensor belongs to, under whatever prefix; None for other tensors."""
    found = _PACKED.fullmatch(name)
    return int(found[1]) if found else None


def packed_name(layer: int, name: str) -> str:
    """Canonical name of one of a layer's six packed tensors, or of its unpacked ones."""
    return f"{DECODER}layers.{layer}.experts.{name}"


def text_tensors(config: ModelConfig) -> dict[str, tuple[tuple[str, ...], Shape]]:
    """Canonical name -> (dtypes accepted, shape) of the whole text network but the experts."""
    tables = [shared_tensors(config), *(layer_tensors(config, i) for i in range(config.num_layers))]
    return {name: (FLOATS, shape) for table in tables for name, shape in table.values()}
