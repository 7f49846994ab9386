"""Stock transformers at the same shapes with random weights, as arms of `bench_step`.

A pass is the difference of two generations of one canvas, of 2 + n and of 2 passes, over n: encoding, set-up and the
end cancel out. Random weights never settle, so neither stops early, and a model built from its configuration alone has
no stopping thresholds anyway.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from redraft.bench.passes import random_tokens
from redraft.bench.step import Arm
from redraft.bench.timing import wall_ms
from redraft.config import ModelConfig, check_choice
from redraft.engine.engine import Engine
from redraft.errors import RedraftError

if TYPE_CHECKING:
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

RIVALS = ("transformers", "transformers-compiled")
BASE_PASSES = 2


def parse_rivals(text: str | None) -> list[str]:
    """Names of a comma-separated list. Raises UsageError on an unknown one."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        check_choice("--vs", name, RIVALS)
    return list(dict.fromkeys(names))


def rivals(names: list[str], engine: Engine, batch: int, prompt_tokens: int) -> dict[str, Callable[[], Arm]]:
    """Builders of arms by name; they share one model, which the first that runs builds."""
    models: list[DiffusionGemmaForBlockDiffusion] = []

    def build(name: str) -> Arm:
        if not models:
            models.append(build_model(engine.config, engine.dtype, engine.device))
        prompt = random_tokens(engine.config.vocab_size, (batch, prompt_tokens), 0, engine.device)
        return TransformersArm(name, models[0], prompt)

    return {name: partial(build, name) for name in names}


class TransformersArm:
    """`generate` of transformers; compiled means its static cache, for which it compiles its forward pass."""

    def __init__(self, name: str, model: DiffusionGemmaForBlockDiffusion, prompt: torch.Tensor):
        self.name, self.model, self.prompt = name, model, prompt
        self.options = {"cache_implementation": "static"} if name == "transformers-compiled" else {}
        self.base_ms: list[float] = []
        self.pass_ms: list[float] = []
        for passes in (BASE_PASSES, BASE_PASSES + 1):  # compiles and warms up
            self._generate(passes)

    def ms_per_pass(self, passes: int) -> float:
        base = self._generate(BASE_PASSES)
        self.base_ms.append(base)
        self.pass_ms.append((self._generate(BASE_PASSES + passes) - base) / passes)
        return self.pass_ms[-1]

    def details(self) -> dict[str, Any]:
        import transformers

        rest = statistics.median(self.base_ms) - BASE_PASSES * statistics.median(self.pass_ms)
        return {"implementation": f"transformers {transformers.__version__}", "encode_and_setup_ms": rest}

    def _generate(self, passes: int) -> float:
        """Milliseconds of one canvas of `passes` passes."""
        given = {"max_new_tokens": self.model.config.canvas_length, "max_denoising_steps": passes, **self.options}
        torch.manual_seed(0)
        return wall_ms(lambda: self.model.generate(input_ids=self.prompt, **given), self.prompt.device)


def build_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DiffusionGemmaForBlockDiffusion:
    """transformers' own network of these shapes, initialised at random on the device."""
    from transformers import DiffusionGemmaForBlockDiffusion

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = DiffusionGemmaForBlockDiffusion._from_config(transformers_config(config))
    except torch.OutOfMemoryError:
        raise RedraftError(
            "transformers' model does not fit beside Redraft's on this GPU; leave --vs out or use a larger one"
        ) from None
    finally:
        torch.set_default_dtype(before)
    model.tie_weights()
    return model.to(device, dtype).eval()


def transformers_config(config: ModelConfig) -> DiffusionGemmaConfig:
    """Our shapes as transformers' configuration, with a vision tower of no consequence."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaTextConfig, Gemma4VisionConfig

    sliding = next((layer for layer in config.layers if layer.kind == "sliding"), config.layers[0])
    full = config.layers[-1]
    alike = (
        "vocab_size", "hidden_size", "intermediate_size", "num_experts", "top_k_experts", "moe_intermediate_size",
        "sliding_window", "max_position_embeddings",
    )  # fmt: skip
    text: dict[str, Any] = {name: getattr(config, name) for name in alike} | {
        "num_hidden_layers": config.num_layers,
        "layer_types": [f"{layer.kind}_attention" for layer in config.layers],
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": sliding.num_kv_heads,
        "head_dim": sliding.head_dim,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.num_kv_heads,
    }
    vision = Gemma4VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=16, position_embedding_size=8,
    )  # fmt: skip
    return DiffusionGemmaConfig(
        text_config=DiffusionGemmaTextConfig(**text), vision_config=vision, canvas_length=config.canvas_length
    )
