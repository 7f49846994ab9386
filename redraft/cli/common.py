"""What every command that runs a model shares: loading, answering on a terminal or into a pipe, figures, JSON."""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal

from redraft.cli.live import DraftView, printable, show_live
from redraft.config import TIERS, WEIGHT_FORMATS, check_choice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.status import Status

    from redraft.engine.engine import Engine, Prompt
    from redraft.engine.events import Result

PIPE_WIDTH = 100_000  # a file has no width; rich wants one


def load_engine(model: str, weights: str | None, tier: str | None, device: str | None) -> Engine:
    """Load a model, saying on stderr what was left out. Raises RedraftError."""
    if weights is not None:
        check_choice("weights", weights, WEIGHT_FORMATS)
    if tier is not None:
        check_choice("tier", tier, TIERS)
    with working(f"loading {model}"):
        import redraft

        given = {"weights": weights, "tier": tier, "device": device}
        engine = redraft.load(model, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
    for note in engine.notes:
        print(f"redraft: note: {note}", file=sys.stderr)
    return engine


@contextmanager
def working(what: str) -> Iterator[Status]:
    """Say on a terminal what is being done, and nothing else."""
    with quiet_libraries(), error_console().status(what) as status:
        yield status


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep the warnings of torch and transformers, which a user cannot act on, off the terminal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def on_terminal() -> bool:
    """Whether stdout is a terminal: then there are figures and, unless it is a dumb one, the live view."""
    return sys.stdout.isatty()


def output_console() -> Console:
    """Stdout, for all that commands print by rich: text as it is, without markup or colours of its own.

    A pipe gets plain text, also where variables would force colours into it, and lines as long as they need to be.
    """
    terminal = on_terminal()
    return Console(
        force_terminal=terminal, width=None if terminal else PIPE_WIDTH, soft_wrap=True, highlight=False, markup=False,
        emoji=False,
    )  # fmt: skip


def error_console() -> Console:
    """Stderr, for progress. It draws on a terminal only."""
    return Console(stderr=True, force_terminal=sys.stderr.isatty())


def answer(
    engine: Engine, prompt: Prompt, seed: int, settings: dict[str, Any], quiet: bool = False, pace: float = 0.0
) -> Result:
    """Answer and print the answer: drawn live on a terminal, plain into a pipe, not at all if `quiet`.

    pace: seconds that each pass stays on the terminal at least.
    """
    console = output_console()
    with quiet_libraries():
        if quiet or not console.is_terminal or console.is_dumb_terminal:
            result = engine.generate(prompt, seed=seed, **settings)
        else:
            view = DraftView(engine.decode, engine.settings.eos_token_ids)
            result = show_live(engine.stream(prompt, seed=seed, **settings), view, console, pace)
    if not quiet:
        print(printable(result.text) if console.is_terminal else result.text, flush=True)
    return result


def print_figures(result: Result, engine: Engine) -> None:
    """The figures of an answer under it."""
    output_console().print(figures(result, engine), style="dim")


def figures(result: Result, engine: Engine) -> str:
    """One line: what the answer cost."""
    steps = ", ".join(map(str, result.steps_per_canvas))
    parts = [
        f"{result.tokens} tokens",
        f"{result.forwards} forwards",
        f"{result.tokens_per_forward:.1f} tokens/forward",
        f"{result.tokens_per_second:.0f} tok/s",
        f"steps per canvas {steps}",
        f"seed {result.seed}",
        f"{engine.weights} weights {decimal(engine.weight_bytes)}",
    ]
    if result.finish_reason == "length":
        parts.append("cut at the token limit")
    return " · ".join(parts)


def describe(engine: Engine, model: str) -> dict[str, Any]:
    """What answered, for JSON output."""
    return {
        "model": model,
        "weights": engine.weights,
        "tier": engine.tier,
        "device": str(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "weight_bytes": engine.weight_bytes,
    }


def print_json(value: dict[str, Any]) -> None:
    """The value on one line of stdout."""
    print(json.dumps(value, ensure_ascii=False), flush=True)
