"""What is compared: an arm is a runner, a precision of the experts, a tier, a checkpoint and decoding settings.

    [engine-]bf16|w4[-TIER] | TIER, then @CHECKPOINT, then +SETTING=VALUE ...

Without `engine-` transformers' own `generate` answers. `bf16` is that and nothing else; `w4` is the same call on the
same model with its routed experts packed, and a tier adds what `redraft.accelerate` installs. A tier or a setting alone
means w4, and a checkpoint alone is taken as it is stored.
"""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

from redraft.config import TIERS, DecodeSettings, Tier, WeightFormat
from redraft.errors import UsageError
from redraft.store.random import is_random

Runner = Literal["transformers", "engine"]

_KIND = re.compile(rf"(?P<engine>engine-)?(?P<weights>bf16|w4)(?:-(?P<tier>{'|'.join(TIERS)}))?")
_SETTING = re.compile(r"(?P<name>[a-z_]+)=(?P<value>[^=]+)")
# Whole or real numbers by their default; end tokens belong to the checkpoint.
_SETTINGS = {name: type(value) for name, value in vars(DecodeSettings()).items() if name != "eos_token_ids"}
GRAMMAR = "[engine-]bf16|w4[-off|-bitexact|-turbo], a tier, a checkpoint, or one of these with +setting=value"


@dataclass(frozen=True)
class Arm:
    """One side of a comparison. `weights` None: as the checkpoint stores them, until `resolved` says how that is."""

    name: str  # as the user wrote it
    model: str
    runner: Runner
    weights: WeightFormat | None
    tier: Tier
    settings: dict[str, Any]

    def resolved(self, stored_packed: bool) -> Self:
        """The same arm with its weights known. Raises UsageError for BF16 experts that are stored in 4 bits only."""
        if self.weights == "bf16" and stored_packed:
            raise UsageError(f"arm {self.name}: {self.model} holds 4-bit experts only; take the BF16 one or w4")
        return dataclasses.replace(self, weights=self.weights or ("w4" if stored_packed else "bf16"))

    @property
    def holder(self) -> tuple[str, Runner, WeightFormat | None]:
        """What has to be in memory for this arm; arms of one holder share it."""
        return self.model, self.runner, self.weights

    def describe(self) -> str:
        """One line for a report."""
        if self.runner == "engine":
            how = f"Redraft's engine, tier {self.tier}"
        elif self.weights == "w4":
            how = f"transformers' generate with packed experts (redraft.accelerate, tier {self.tier})"
        else:
            how = "transformers' generate as it is" + (f", with tier {self.tier}" if self.tier != "off" else "")
        changed = ", ".join(f"{name} {value:g}" for name, value in self.settings.items())
        return f"{how}; {self.weights} experts of {self.model}" + (f"; {changed}" if changed else "")


def parse_arms(text: str, model: str) -> list[Arm]:
    """The arms of a comma-separated list, `model` being the checkpoint of those that name none. Raises UsageError."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if len(names) < 2:
        raise UsageError(f"--arms is {text!r}, expected at least two, such as bf16,w4")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(f"--arms names {', '.join(repeated)} twice")
    return [_parse(name, model) for name in names]


def _parse(name: str, model: str) -> Arm:
    base, *parts = name.split("+")
    if _SETTING.fullmatch(base):
        base, parts = "w4", [base, *parts]
    kind, _, place = base.partition("@")
    settings = dict(_setting(name, part) for part in parts)
    DecodeSettings().replace(**settings)
    found = _KIND.fullmatch(f"w4-{kind}" if kind in TIERS else kind)
    if found:
        runner: Runner = "engine" if found["engine"] else "transformers"
        tier = found["tier"] or ("turbo" if found["engine"] else "off")
        return Arm(name, place or model, runner, cast(WeightFormat, found["weights"]), cast(Tier, tier), settings)
    if base == "demo" or is_random(base) or "/" in base or Path(base).is_dir():
        return Arm(name, base, "transformers", None, "off", settings)
    raise UsageError(f"arm {name!r} is neither a kind nor a checkpoint; an arm is {GRAMMAR}")


def _setting(arm: str, part: str) -> tuple[str, Any]:
    found = _SETTING.fullmatch(part)
    if not found or found["name"] not in _SETTINGS:
        raise UsageError(f"arm {arm!r}: {part!r} is not SETTING=VALUE with one of {', '.join(_SETTINGS)}")
    try:
        return found["name"], _SETTINGS[found["name"]](found["value"])
    except ValueError:
        raise UsageError(f"arm {arm!r}: {found['value']!r} is not a number as {found['name']} needs one") from None
