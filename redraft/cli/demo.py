"""`redraft demo`: the bundled model answers three prompts in 4 bits and shows what the 4 bits save."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from redraft.cli import options
from redraft.errors import RedraftError

if TYPE_CHECKING:
    from redraft.engine import Engine
    from redraft.weights import Weights

# The first held-out item of each: prompts that training has never seen, the same on every machine.
DEMO_TASKS = ("arithmetic", "edit", "code")


def command(
    seed: options.Seed = 0,
    max_new_tokens: options.MaxNewTokens = None,
    entropy_bound: options.EntropyBound = None,
    steps: options.Steps = None,
    weights: options.Weights = "w4",
    tier: options.TierOption = None,
    device: options.Device = None,
    json_output: options.Json = False,
) -> None:
    """Watch the bundled model answer three prompts it was not trained on, in 4 bits. Fails if an answer is wrong."""
    from redraft.cli.common import describe, load_engine, print_json

    settings = options.decode_settings(seed, max_new_tokens, entropy_bound, steps)
    engine = load_engine("demo", weights, tier, device)
    answers = [_answer(engine, name, seed, settings, json_output) for name in DEMO_TASKS]
    sizes = measure(engine.model.weights)
    if json_output:
        print_json({"answers": answers, "sizes": asdict(sizes), **describe(engine, "demo")})
    else:
        print(sizes.text(engine.weights))
    if not all(a["correct"] for a in answers):
        raise RedraftError(f"{sum(not a['correct'] for a in answers)} of {len(answers)} answers are wrong")


def _answer(engine: Engine, name: str, seed: int, settings: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """Ask one prompt, grade the answer and show both."""
    from redraft.cli.common import answer, print_figures
    from redraft.demo.tasks import TASKS

    item = TASKS[name].heldout_items(1)[0]
    if not quiet:
        print(f"[{name}] {item.prompt}", flush=True)
    result = answer(engine, item.prompt, seed, settings, quiet)
    correct = TASKS[name].grade(item, result.text)
    if not quiet:
        print("=> correct" if correct else f"=> incorrect, expected:\n{item.answer}")
        print_figures(result, engine)
        print(flush=True)
    return {"task": name, "prompt": item.prompt, "correct": correct, **result.to_dict()}


@dataclass(frozen=True)
class Sizes:
    """Bytes of the experts and of the whole model: all in BF16, and with the experts as they are loaded.

    Everything but the experts counts 2 bytes a weight in both, as on disk, even where a CPU computes in fp32.
    """

    experts_bf16: int
    experts: int
    model_bf16: int
    model: int

    def text(self, weights: str) -> str:
        """Two lines, each beside its BF16 size."""
        return "\n".join(
            f"{part:<7} {weights} {decimal(size):>9}, BF16 {decimal(full):>9} ({full / size:.2f}x)"
            for part, size, full in (
                ("experts", self.experts, self.experts_bf16),
                ("model", self.model, self.model_bf16),
            )
        )


def measure(weights: Weights) -> Sizes:
    """The sizes of a loaded network."""
    from redraft.weights import PackedExperts, iter_tensors, nbytes

    experts = [layer.experts for layer in weights.layers]
    expert_weights = sum(
        2 * (e.gu_q.numel() + e.dn_q.numel()) if isinstance(e, PackedExperts) else e.gate_up.numel() + e.down.numel()
        for e in experts
    )
    packed = isinstance(experts[0], PackedExperts)
    expert_bytes = sum(map(nbytes, experts)) if packed else 2 * expert_weights
    tensors = sum(t.numel() for _, t in iter_tensors(weights))
    rest = 2 * (tensors - sum(t.numel() for e in experts for _, t in iter_tensors(e)))
    return Sizes(2 * expert_weights, expert_bytes, 2 * expert_weights + rest, expert_bytes + rest)
