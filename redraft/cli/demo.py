"""`redraft demo`: the bundled model answers three prompts in 4 bits and shows what the 4 bits save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from redraft.cli import options
from redraft.errors import RedraftError

if TYPE_CHECKING:
    from redraft.engine.engine import Engine

# The first held-out item of each: prompts that training has never seen, the same on every machine.
DEMO_TASKS = ("arithmetic", "edit", "code")
PACE = 0.15  # seconds a pass; the bundled model is too fast to watch


@dataclass(frozen=True)
class FourBits(options.Loading):
    """Loading with other experts than those of the bundled checkpoint."""

    weights: options.Weights = "w4"


@options.grouped
def command(*, decoding: options.Decoding, loading: FourBits, json_output: options.Json = False) -> None:
    """Watch the bundled model answer three prompts it was not trained on, in 4 bits. Fails if an answer is wrong."""
    from redraft.cli.common import describe, print_json

    settings = decoding.settings()
    engine = loading.engine("demo")
    answers = [_answer(engine, name, decoding.seed, settings, json_output) for name in DEMO_TASKS]
    if json_output:
        print_json({"answers": answers, "sizes": sizes(), **describe(engine, "demo")})
    else:
        for part, taken in sizes().items():
            packed, plain = decimal(taken["w4"]), decimal(taken["bf16"])
            print(f"{part:<7}  w4 {packed:>9}  BF16 {plain:>9}  ({taken['bf16'] / taken['w4']:.2f}x smaller)")
    if not all(a["correct"] for a in answers):
        raise RedraftError(f"{sum(not a['correct'] for a in answers)} of {len(answers)} answers are wrong")


def _answer(engine: Engine, name: str, seed: int, settings: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """Ask one prompt, grade the answer and show both."""
    from redraft.cli.common import answer, print_figures
    from redraft.evaluate.demo import TASKS

    item = TASKS[name].items(1)[0]
    if not quiet:
        print(f"[{name}] {item.prompt}", flush=True)
    result = answer(engine, item.prompt, seed, settings, quiet, PACE)
    correct = TASKS[name].grade(item, result.text)
    if not quiet:
        print("=> correct" if correct else f"=> incorrect, expected:\n{item.expected}")
        print_figures(result, engine)
        print(flush=True)
    return {"task": name, "prompt": item.prompt, "correct": correct, **result.to_dict()}


def sizes() -> dict[str, dict[str, int]]:
    """Bytes of the bundled experts and of the whole bundled model, as BF16 on disk and packed."""
    from redraft.cli.inspect import summarize
    from redraft.store.open import open_model

    summary = summarize(open_model("demo"))
    parts = {"experts": summary["parts"]["experts"], "model": summary["total"]}
    return {name: {"bf16": part["bytes"], "w4": part["w4_bytes"]} for name, part in parts.items()}
