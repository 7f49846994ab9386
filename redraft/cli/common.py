"""What every command that runs a model shares: answering on a terminal or into a pipe, figures, JSON."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal
from rich.status import Status

from redraft.cli.live import DraftView, printable, show_live
from redraft.engine.events import Result

if TYPE_CHECKING:
    from redraft.engine.engine import Engine, Prompt

PIPE_WIDTH = 100_000  # a file has no width; rich wants one


@contextmanager
def working(what: str) -> Iterator[Status]:
    """Say on a terminal what is being done, and nothing else."""
    with quiet_libraries(), error_console().status(what) as status:
        yield status


def quiet_libraries() -> AbstractContextManager[Any]:
    """Keep the warnings of torch and transformers, which a user cannot act on, off the terminal."""
    return warnings.catch_warnings(action="ignore")


def output_console() -> Console:
    """Stdout, for all that commands print by rich: text as it is, without markup or colours of its own.

    A pipe gets plain text, also where variables would force colours into it, and lines as long as they need to be.
    A terminal gets figures too and, unless it is a dumb one, the live view.
    """
    terminal = sys.stdout.isatty()
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
    """One line: what an answer cost."""
    steps = ", ".join(map(str, result.steps_per_canvas))
    figures = (
        f"{result.tokens} tokens · {result.forwards} forwards · {result.tokens_per_forward:.1f} tokens/forward"
        f" · {result.tokens_per_second:.0f} tok/s · steps per canvas {steps} · seed {result.seed}"
        f" · {engine.weights} weights {decimal(engine.weight_bytes)}"
    )
    cut = " · cut at the token limit" if result.finish_reason == "length" else ""
    output_console().print(figures + cut, style="dim")


def print_facts(result: Result, engine: Engine, model: str, json_output: bool) -> None:
    """What follows an answer: the JSON line where it is asked for, else the figures on a terminal."""
    if json_output:
        print_json({**result.to_dict(), **describe(engine, model)})
    elif sys.stdout.isatty():
        print_figures(result, engine)


def describe(engine: Engine, model: str) -> dict[str, Any]:
    """What answered, for JSON output."""
    return {
        "model": model, "weights": engine.weights, "tier": engine.tier, "device": str(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."), "weight_bytes": engine.weight_bytes,
    }  # fmt: skip


def print_json(value: dict[str, Any]) -> None:
    """The value on one line of stdout."""
    print(json.dumps(value, ensure_ascii=False), flush=True)
