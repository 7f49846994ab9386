"""Running one generation on both sides, and judging the first difference if there is one."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

from redraft.engine.eager import Rows
from redraft.engine.engine import Engine

EXCUSED_MARGIN = 1e-5


@dataclass(frozen=True)
class Case:
    """One generation: prompts of token ids, a torch seed, and transformers' settings."""

    prompts: list[list[int]]
    seed: int
    settings: dict[str, Any]
    eos: list[int]

    def label(self) -> str:
        values = "-".join(f"{value:g}" for value in self.settings.values())
        return f"seed{self.seed}-batch{len(self.prompts)}-{values}"


class _Drafts:
    """A transformers streamer that keeps every pass's argmax canvas."""

    def __init__(self) -> None:
        self.drafts: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None: ...

    def put_draft(self, value: torch.Tensor) -> None:
        self.drafts.append(value.clone())

    def end(self) -> None: ...


def run_transformers(model: Any, case: Case) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(new tokens [B, N], tokens per forward [B], argmax canvas per pass)."""
    longest = max(map(len, case.prompts))
    rows = [[0] * (longest - len(p)) + p for p in case.prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in case.prompts]
    settings = dict(case.settings)
    settings["sampler_config"] = EntropyBoundSamplerConfig(entropy_bound=settings.pop("entropy_bound"))
    streamer = _Drafts()
    torch.manual_seed(case.seed)
    out = model.generate(
        input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask), pad_token_id=0, eos_token_id=case.eos,
        streamer=streamer, **settings,
    )  # fmt: skip
    return out.sequences[:, longest:], out.tokens_per_forward, streamer.drafts


def assert_same(engine: Engine, model: Any, case: Case, monkeypatch: Any) -> str | None:
    """Assert equal tokens and tokens per forward. Returns a line describing an excused divergence, or None."""
    expected, expected_rate, drafts = run_transformers(model, case)
    with monkeypatch.context() as patch:
        canvases, margins = _trace(patch)
        results = engine.generate_batch(
            case.prompts, seed=case.seed, tier="bitexact", eos_token_ids=tuple(case.eos), **case.settings
        )
    got = [r.token_ids + [0] * (expected.shape[1] - len(r.token_ids)) for r in results]
    if got == expected.tolist():
        rates = torch.tensor([r.tokens_per_forward for r in results])
        torch.testing.assert_close(rates, expected_rate.float(), rtol=1e-6, atol=0)
        return None
    step = next((i for i, (a, b) in enumerate(zip(canvases, drafts, strict=False)) if not torch.equal(a, b)), None)
    assert step is not None, f"{case.label()}: the passes agree but the committed tokens do not"
    margin = min(margins[: step + 1])
    assert margin < EXCUSED_MARGIN, f"{case.label()}: differs at pass {step} with every margin above {margin:.2e}"
    return f"{case.label()}: pass {step}, smallest margin {margin:.2e}"


def _trace(patch: Any) -> tuple[list[torch.Tensor], list[float]]:
    """Per pass from now on: our argmax canvas, and its decisions' smallest margin (argmax, draw, acceptance, stop)."""
    canvases, margins, original = [], [], Rows.take

    def take(rows: Rows, logits: torch.Tensor) -> None:
        scaled, own = logits / rows.state.temperature[:, None, None], rows.own
        margins.append(smallest_margin(scaled, own.entropy_bound[:, None], own.confidence_threshold))
        original(rows, logits)
        canvases.append(rows.canvases.argmax.view(rows.canvas.shape).clone())

    patch.setattr(Rows, "take", take)
    return canvases, margins


def smallest_margin(scaled: torch.Tensor, bound: Any, confidence: Any) -> float:
    """Of a pass's decisions: argmax, acceptance by the bound in nats, a number or [B, 1], and stop."""
    top = scaled.topk(2, dim=-1).values
    entropy = torch.distributions.Categorical(logits=scaled, validate_args=False).entropy()
    ordered = entropy.sort(dim=-1).values
    slack = (ordered.cumsum(-1) - ordered - bound).abs()
    confident = (entropy.mean(-1) - confidence).abs()
    return float(min((top[..., 0] - top[..., 1]).min(), slack.min(), confident.min()))
