"""Options that several commands share, so that a flag has one name, one help text, one default and one meaning.

A parameter of a command is one of the types here, or, under `grouped`, a dataclass whose fields are such options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from redraft.config import TIERS, WEIGHT_FORMATS, DecodeSettings, check_seed
from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.engine.engine import Engine

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A checkpoint directory, a hub id, 'demo' (the bundled model), or 'random:26b-a4b'."
    ),
]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="System message put before the first turn.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of every random draw.")]
MaxNewTokens = Annotated[
    int | None, typer.Option("--max-new-tokens", metavar="N", help="Upper limit of the answer, in tokens.")
]
EntropyBound = Annotated[
    float | None,
    typer.Option("--entropy-bound", metavar="NATS", help="How much uncertainty one pass may accept; less is slower."),
]
Steps = Annotated[int | None, typer.Option("--steps", metavar="N", help="Most denoising passes on one canvas.")]
Weights = Annotated[
    str | None, typer.Option("--weights", metavar="|".join(WEIGHT_FORMATS), help="Precision of the expert weights.")
]
TierOption = Annotated[
    str | None, typer.Option("--tier", metavar="|".join(TIERS), help="How far speed may go; turbo is the fastest.")
]
Device = Annotated[str | None, typer.Option("--device", metavar="cpu|cuda", help="Where to compute.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw the roofline to a png, svg or pdf (needs matplotlib)."),
]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Where the files of benchmarks are; without it the hub is asked."),
]
Only = Annotated[str | None, typer.Option("--only", metavar="NAME", help="Only kernels whose name contains NAME.")]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", metavar="N", min=1, help="Length of the encoded prompt.")]
Batch = Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Canvases in a pass.")]
Passes = Annotated[int, typer.Option("--passes", metavar="N", min=1, help="Consecutive passes that one sample times.")]
Rounds = Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="Samples of each implementation or size.")]


@dataclass(frozen=True)
class Loading:
    """How MODEL is loaded."""

    weights: Weights = None
    tier: TierOption = None
    device: Device = None

    def engine(self, model: str) -> Engine:
        """Load a model, saying on stderr what was left out. Raises RedraftError."""
        from redraft.cli.common import load_engine

        return load_engine(model, self.weights, self.tier, self.device)


@dataclass(frozen=True)
class Decoding:
    """How answers are made."""

    seed: Seed = 0
    max_new_tokens: MaxNewTokens = None
    entropy_bound: EntropyBound = None
    steps: Steps = None

    def settings(self) -> dict[str, Any]:
        return decode_settings(self.seed, self.max_new_tokens, self.entropy_bound, self.steps)


def group(help_text: str) -> typer.Typer:
    """A command of subcommands; alone it prints its help."""
    app = typer.Typer(add_completion=False)

    @app.callback(invoke_without_command=True, help=help_text)
    def alone(ctx: typer.Context) -> None:
        if ctx.invoked_subcommand is None:
            print(ctx.get_help())

    return app


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command for typer: options in place of every parameter that is a dataclass of them. All by keyword."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            options = get_type_hints(groups[name], include_extras=True)
            given = [(field.name, field.default, options[field.name]) for field in fields(groups[name])]
        else:
            given = [(name, parameter.default, hints[name])]
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, default, annotation in given
        ]

    def call(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        return command(**given)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__doc__ = command.__doc__
    return call


def numbers(option: str, text: str, what: str = "numbers") -> tuple[int, ...]:
    """The positive numbers of a list such as 1,4,16. Raises UsageError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{option} is {text!r}, expected {what} such as 1,4,16")
    return tuple(map(int, parts))


def decode_settings(
    seed: int, max_new_tokens: int | None, entropy_bound: float | None, steps: int | None
) -> dict[str, Any]:
    """The settings the user gave, as keywords of the engine. Raises UsageError before a model is loaded for nothing."""
    given = {"max_new_tokens": max_new_tokens, "entropy_bound": entropy_bound, "max_denoising_steps": steps}
    check_seed(seed)
    DecodeSettings().replace(**given)
    return {name: value for name, value in given.items() if value is not None}
