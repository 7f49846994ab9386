"""Options that several commands share, so that a flag has one name, one help text, one default and one meaning.

A parameter of a command is one of the types here, or, under `grouped`, a dataclass whose fields are such options.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import redraft
from redraft.cli import HelpfulGroup
from redraft.cli.common import working
from redraft.config import TIERS, WEIGHT_FORMATS, DecodeSettings, check_choice, check_seed
from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.engine.engine import Engine


def option(flag: str, metavar: str, help_text: str, **more: Any) -> Any:
    """An option with a value, for `Annotated`."""
    return typer.Option(flag, metavar=metavar, help=help_text, **more)


MODEL_HELP = "A checkpoint directory, a hub id, 'demo' (the bundled model), or 'random:26b-a4b'."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
System = Annotated[str | None, option("--system", "TEXT", "System message put before the first turn.")]
Seed = Annotated[int, option("--seed", "N", "Seed of every random draw.")]
MaxNewTokens = Annotated[int | None, option("--max-new-tokens", "N", "Upper limit of the answer, in tokens.")]
BOUND_HELP = "How much uncertainty one pass may accept; less is slower."
EntropyBound = Annotated[float | None, option("--entropy-bound", "NATS", BOUND_HELP)]
Steps = Annotated[int | None, option("--steps", "N", "Most denoising passes on one canvas.")]
Weights = Annotated[str | None, option("--weights", "|".join(WEIGHT_FORMATS), "Precision of the expert weights.")]
TierOption = Annotated[str | None, option("--tier", "|".join(TIERS), "How far speed may go; turbo is the fastest.")]
Device = Annotated[str | None, option("--device", "cpu|cuda", "Where to compute.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Plot = Annotated[Path | None, option("--plot", "FILE", "Draw the roofline to a png, svg or pdf (needs matplotlib).")]
DATA_HELP = "Where the files of benchmarks are; without it the hub is asked."
Data = Annotated[Path | None, option("--data", "DIR", DATA_HELP)]
Only = Annotated[str | None, option("--only", "NAME", "Only kernels whose name contains NAME.")]
PromptTokens = Annotated[int, option("--prompt-tokens", "N", "Length of the encoded prompt.", min=1)]
Batch = Annotated[int, option("--batch", "N", "Canvases in a pass.", min=1)]
Passes = Annotated[int, option("--passes", "N", "Consecutive passes that one sample times.", min=1)]
Rounds = Annotated[int, option("--rounds", "N", "Samples of each implementation or size.", min=1)]


@dataclass(frozen=True)
class Loading:
    """How MODEL is loaded."""

    weights: Weights = None
    tier: TierOption = None
    device: Device = None

    def engine(self, model: str) -> "Engine":
        """Load a model, saying on stderr what was left out. Raises RedraftError."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        for name, choices in (("weights", WEIGHT_FORMATS), ("tier", TIERS)):
            if name in given:
                check_choice(name, given[name], choices)
        with working(f"loading {model}"):
            engine = redraft.load(model, **given)
        for note in engine.notes:
            print(f"redraft: note: {note}", file=sys.stderr)
        return engine


@dataclass(frozen=True)
class Decoding:
    """How answers are made."""

    seed: Seed = 0
    max_new_tokens: MaxNewTokens = None
    entropy_bound: EntropyBound = None
    max_denoising_steps: Steps = None

    def settings(self) -> dict[str, Any]:
        """Those given, as keywords of the engine. Raises UsageError before a model is loaded for nothing."""
        check_seed(self.seed)
        given = {name: value for name, value in vars(self).items() if name != "seed" and value is not None}
        DecodeSettings().replace(**given)
        return given


def group(help_text: str) -> typer.Typer:
    """A command of subcommands; alone it prints its help."""
    return typer.Typer(cls=HelpfulGroup, help=help_text, add_completion=False)


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command for typer: options in place of every parameter that is a dataclass of them. All by keyword."""
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            options = inspect.signature(groups[name], eval_str=True).parameters.values()
            parameters += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
        else:
            parameters.append(parameter)

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
