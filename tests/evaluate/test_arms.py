"""The names of arms: what each stands for, and what is refused."""

from pathlib import Path

import pytest

from redraft.errors import UsageError
from redraft.evaluate.arms import Arm, parse_arms

HERE = str(Path(__file__).parent)


def one(text: str) -> Arm:
    """The arm of a name, beside a second one that does not matter."""
    return parse_arms(f"{text}, engine-bf16-off+entropy_bound=7", "some/model")[0]


@pytest.mark.parametrize(
    ("name", "runner", "weights", "tier"),
    [
        ("bf16", "transformers", "bf16", "off"), ("w4", "transformers", "w4", "off"),
        ("w4-off", "transformers", "w4", "off"), ("w4-bitexact", "transformers", "w4", "bitexact"),
        ("w4-turbo", "transformers", "w4", "turbo"), ("off", "transformers", "w4", "off"),
        ("turbo", "transformers", "w4", "turbo"), ("bf16-bitexact", "transformers", "bf16", "bitexact"),
        ("engine-w4", "engine", "w4", "turbo"), ("engine-bf16", "engine", "bf16", "turbo"),
        ("engine-bf16-bitexact", "engine", "bf16", "bitexact"),
    ],
)  # fmt: skip
def test_kinds(name: str, runner: str, weights: str, tier: str) -> None:
    for text, model in ((name, "some/model"), (f"{name}@{HERE}", HERE)):
        assert one(text) == Arm(text, model, runner, weights, tier, {})  # type: ignore[arg-type]


def test_settings_keep_their_types() -> None:
    arm = one("entropy_bound=0.2+max_denoising_steps=12")
    assert (arm.weights, arm.runner) == ("w4", "transformers")
    assert arm.settings == {"entropy_bound": 0.2, "max_denoising_steps": 12}
    assert type(arm.settings["max_denoising_steps"]) is int
    assert one("engine-bf16+t_max=0.3+t_min=0.2").settings == {"t_max": 0.3, "t_min": 0.2}


@pytest.mark.parametrize("place", ["demo", "org/name", "random:tiny:7", "./a@b", HERE])
def test_a_checkpoint_is_taken_as_it_is_stored(place: str) -> None:
    arm = one(f"{place}+entropy_bound=1")
    assert (arm.model, arm.weights, arm.settings) == (place, None, {"entropy_bound": 1.0})
    assert [arm.resolved(packed).weights for packed in (False, True)] == ["bf16", "w4"]


def test_bf16_of_packed_files_is_refused() -> None:
    with pytest.raises(UsageError, match="arm bf16: some/model holds 4-bit experts only"):
        one("bf16").resolved(stored_packed=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf16", "expected at least two"), ("w4,bf16,w4", "names w4 twice"),
        ("bf16,w5", "arm 'w5' is neither a kind nor a checkpoint"), ("bf16,w4-fast", "'w4-fast' is neither"),
        ("bf16,w4+steps=3", "'steps=3' is not SETTING=VALUE with one of max_new_tokens"),
        ("bf16,w4+entropy_bound", "'entropy_bound' is not SETTING=VALUE"),
        ("bf16,w4+max_new_tokens=1.5", "'1.5' is not a number as max_new_tokens needs one"),
        ("bf16,entropy_bound=0", "entropy_bound is 0.0, expected a number above 0"),
        ("bf16,w4+t_max=0.3", "t_max 0.3 is below t_min"),
    ],
)  # fmt: skip
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_arms(text, "demo")


def test_descriptions_tell_arms_apart() -> None:
    assert one("bf16").describe() == "transformers' generate as it is; bf16 experts of some/model"
    assert "redraft.accelerate, tier turbo" in one("turbo").describe()
    assert one("engine-w4+entropy_bound=0.2").describe() == (
        "Redraft's engine, tier turbo; w4 experts of some/model; entropy_bound 0.2"
    )
