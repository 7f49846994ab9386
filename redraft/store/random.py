"""Checkpoints of random weights: `random:26b-a4b`, `random:demo`, `random:tiny`, drawn on the device in seconds.

They have a model's shapes, so they cost what it costs, and they say nothing: with random weights the router spreads
tokens almost evenly over the experts, which is the worst case for bytes read. `random:NAME:SEED` draws other weights.

Every matrix of width K is Gaussian of variance 1/K and every norm of the residual is one, so that activations keep
their size through any number of layers; q_norm and k_norm are D^-1/4, which gives attention scores of variance 1 for
heads of dimension D. One norm is not: attention with random weights averages the prefix to much the same vector for
every token, and its post-norm would make that vector as large as the token's own. A few layers later all tokens would
choose the same experts, and many of them would never be read. Experts are drawn packed, as uniform nibbles with
scales and zero points around the values that give them the same variance; asked for in BF16 they are those same
experts, dequantised.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from redraft.config import DecodeSettings, LayerConfig, ModelConfig, QuantSpec, WeightFormat
from redraft.device import free_memory
from redraft.errors import RedraftError, UsageError
from redraft.kernels.packing import dequantize
from redraft.network.weights import DenseExperts, PackedExperts
from redraft.store.bf16 import Bf16
from redraft.store.dg_w4a16 import DgW4A16, packed_shapes
from redraft.store.names import Shape, text_tensors
from redraft.store.read import Checkpoint, CheckpointFiles, Progress, assemble
from redraft.store.tensorfile import TensorInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREFIX = "random:"
NIBBLE_MEAN = 7.5
NIBBLE_STD = math.sqrt((16**2 - 1) / 12)  # of a uniform nibble

_NAME = re.compile(r"random:([\w.-]+)(?::(\d+))?")


def _layers(count: int, sliding: tuple[int, int], full: tuple[int, int]) -> tuple[LayerConfig, ...]:
    """`count` layers, every sixth and the last full; sliding and full are (head_dim, kv_heads)."""
    kinds = {
        False: LayerConfig("sliding", *sliding, rope_theta=1e4, partial_rotary_factor=1.0),
        True: LayerConfig("full", *full, rope_theta=1e6, partial_rotary_factor=0.25),
    }
    return tuple(kinds[i % 6 == 5 or i == count - 1] for i in range(count))


def _config(**fields: int | tuple[LayerConfig, ...]) -> ModelConfig:
    common = {"rms_norm_eps": 1e-6, "final_logit_softcap": 30.0, "pad_token_id": 0, "bos_token_id": 2}
    return ModelConfig(**common, **fields)  # type: ignore[arg-type]


PRESETS: dict[str, ModelConfig] = {
    # google/diffusiongemma-26B-A4B-it
    "26b-a4b": _config(
        vocab_size=262_144, hidden_size=2816, intermediate_size=2112, num_heads=16,
        layers=_layers(30, (256, 8), (512, 2)), sliding_window=1024, num_experts=128, top_k_experts=8,
        moe_intermediate_size=704, canvas_length=256, max_position_embeddings=262_144,
    ),
    # the bundled model
    "demo": _config(
        vocab_size=1280, hidden_size=256, intermediate_size=320, num_heads=4,
        layers=_layers(6, (64, 2), (128, 1)), sliding_window=128, num_experts=16, top_k_experts=4,
        moe_intermediate_size=128, canvas_length=64, max_position_embeddings=1024,
    ),
    # the smallest that has both kinds of layers, the published group sizes and room for a byte vocabulary
    "tiny": _config(
        vocab_size=320, hidden_size=128, intermediate_size=96, num_heads=4,
        layers=_layers(2, (16, 2), (32, 1)), sliding_window=48, num_experts=8, top_k_experts=2,
        moe_intermediate_size=64, canvas_length=16, max_position_embeddings=4096,
    ),
}  # fmt: skip


def is_random(model: str | Path) -> bool:
    """Whether a MODEL argument names random weights rather than files."""
    return str(model).startswith(PREFIX)


def named(model: str | Path) -> tuple[ModelConfig, int]:
    """Shapes and seed of `random:NAME[:SEED]`. Raises UsageError for a name without a preset."""
    found = _NAME.fullmatch(str(model))
    if not found or found[1] not in PRESETS:
        known = ", ".join(PREFIX + name for name in PRESETS)
        seeded = f"each also with a seed as in {PREFIX}tiny:7"
        raise UsageError(f"{model}: no such random model; known are {known}, {seeded}")
    return PRESETS[found[1]], int(found[2] or 0) % 2**63


def random_files(model: str | Path) -> CheckpointFiles:
    """The headers that a packed checkpoint of these shapes would have; there is no file behind them."""
    (config, _), layout, path = named(model), DgW4A16(QuantSpec()), Path(str(model))
    expected = layout.tensors(config).items()
    text = {name: [TensorInfo(name, path, dtypes[0], shape, 0)] for name, (dtypes, shape) in expected}
    return CheckpointFiles(path, layout, config, _settings(config), text, {})


def random_checkpoint(
    model: str | Path, weights: WeightFormat | None = None, dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu", spec: QuantSpec | None = None, progress: Progress | None = None,
) -> Checkpoint:  # fmt: skip
    """Draw a whole network on `device`; the arguments are those of `quant.load.load_checkpoint`.

    The same name gives the same weights on the same kind of device. Raises UsageError for an unknown name or group
    sizes that do not fit, RedraftError when the weights exceed the free memory.
    """
    (config, seed), spec, target = named(model), spec or QuantSpec(), torch.device(device)
    spec.check(config)
    layout = Bf16() if weights == "bf16" else DgW4A16(spec)
    needed, free = weight_bytes(config, layout.spec, dtype), free_memory(target)
    if free is not None and needed > free:
        raise RedraftError(
            f"{model}: the weights take {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free on {target}; "
            "use another device, a smaller model or weights w4"
        )
    generator = torch.Generator(target).manual_seed(seed)

    def plain(field: str, name: str, shape: Shape) -> torch.Tensor:
        return _draw(field, torch.empty(shape, device=generator.device, dtype=dtype), generator)

    def experts(layer: int) -> DenseExperts | PackedExperts:
        packed = draw_experts(config, spec, generator)
        return unpack_experts(packed, dtype) if weights == "bf16" else packed

    network = assemble(config, plain, experts, progress)
    notes = ["the weights are random: timings and memory are real, answers are noise"]
    return Checkpoint(Path(str(model)), layout.name, config, _settings(config), network, layout.spec, notes)


def weight_bytes(config: ModelConfig, spec: QuantSpec | None, dtype: torch.dtype) -> int:
    """Bytes of all weights in memory: experts packed with `spec`, or like everything else in `dtype`."""
    plain = sum(math.prod(shape) for _, shape in text_tensors(config).values())
    layer = Bf16().layer_bytes(config) // 2 * dtype.itemsize if spec is None else DgW4A16(spec).layer_bytes(config)
    return plain * dtype.itemsize + config.num_layers * layer


def _settings(config: ModelConfig) -> DecodeSettings:
    return DecodeSettings(max_new_tokens=config.canvas_length)


def _draw(field: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Fill a tensor that is no expert's."""
    width = tensor.shape[-1]
    if tensor.ndim > 1:
        return tensor.normal_(generator=generator).mul_(width**-0.5)
    values = {"q_norm": width**-0.25, "k_norm": width**-0.25, "post_attention_layernorm": 0.1}
    return tensor.fill_(values.get(field, 1.0))


def draw_experts(config: ModelConfig, spec: QuantSpec, generator: torch.Generator) -> PackedExperts:
    """One layer's experts, packed, on the generator's device."""
    width = {"gu": config.hidden_size, "dn": config.moe_intermediate_size}
    tensors = {}
    for name, (_, shape) in packed_shapes(config, spec).items():
        if name.endswith("q"):
            tensors[name] = _bytes(shape, generator)
        elif name.endswith("s"):
            tensors[name] = _around(shape, width[name[:2]] ** -0.5 / NIBBLE_STD, 0.25, generator)
        else:
            tensors[name] = _around(shape, NIBBLE_MEAN, 0.05, generator)
    return PackedExperts(**tensors)


def unpack_experts(packed: PackedExperts, dtype: torch.dtype) -> DenseExperts:
    """The same experts unpacked in `dtype`, with no more than one expert's fp32 copy at a time."""
    experts, rows, half = packed.gu_q.shape
    gate_up = torch.empty(experts, rows, 2 * half, device=packed.gu_q.device, dtype=dtype)
    down = torch.empty(experts, 2 * half, rows // 2, device=packed.gu_q.device, dtype=dtype)
    for e in range(experts):
        gate_up[e] = dequantize(packed.gu_q[e], packed.gu_s[e], packed.gu_z[e], dtype)
        down[e] = dequantize(packed.dn_q[e], packed.dn_s[e], packed.dn_z[e], dtype)
    return DenseExperts(gate_up, down)


def _bytes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Uniform bytes, drawn eight at a time."""
    count = math.prod(shape)
    words = torch.empty(-(-count // 8), dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:count].view(shape)


def _around(shape: tuple[int, ...], middle: float, spread: float, generator: torch.Generator) -> torch.Tensor:
    """fp16, uniform within `spread` (relative) of `middle`."""
    noise = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return noise.mul_(2 * spread).add_(1 - spread).mul_(middle).half()


SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>")  # ids 0 to 4; the bytes follow

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}"
    "{{ message['content'] | trim + '<turn|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
)


def random_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """A tokenizer for weights that never learnt one: a token per byte, and `<id>` for every other id of the model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: i for i, token in enumerate(alphabet)}
    vocab |= {f"<{i}>": i for i in range(len(alphabet), config.vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL_TOKENS[0], eos_token=SPECIAL_TOKENS[1],
        bos_token=SPECIAL_TOKENS[2], additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False,
    )  # fmt: skip
