"""Option types that several commands share, so that a flag has one name, one help text and one meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from redraft.config import TIERS, WEIGHT_FORMATS, DecodeSettings, check_choice, check_seed

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


def decode_settings(
    seed: int, max_new_tokens: int | None, entropy_bound: float | None, steps: int | None
) -> dict[str, Any]:
    """The settings the user gave, as keywords of the engine. Raises UsageError before a model is loaded for nothing."""
    given = {"max_new_tokens": max_new_tokens, "entropy_bound": entropy_bound, "max_denoising_steps": steps}
    check_seed(seed)
    DecodeSettings().replace(**given)
    return {name: value for name, value in given.items() if value is not None}


def check_load_options(weights: str | None, tier: str | None) -> None:
    """Raise UsageError before a model is looked for."""
    if weights is not None:
        check_choice("weights", weights, WEIGHT_FORMATS)
    if tier is not None:
        check_choice("tier", tier, TIERS)
