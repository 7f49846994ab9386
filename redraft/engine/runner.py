"""What runs passes for the loop: `graphs.GraphRunner` on a GPU, `eager.EagerRunner` and `LockstepRunner` elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from redraft.config import DecodeSettings
from redraft.decode.rule import Rule

PIECE = 1024  # prompt rows a pass, where a prompt has more than a canvas: 64 rows an expert at 128 experts, 8 chosen


@dataclass(frozen=True)
class SlotStatus:
    """Where a slot stood after a pass: whether its canvas is done, passes so far, and what a draft shows of it."""

    slot: int
    owner: int  # the request that had the slot when the pass was launched
    done: bool
    canvas: int  # from 0
    step: int  # from 1
    argmax: list[int]
    accepted: list[bool]
    mean_entropy: float


class Runner(Protocol):
    """Slots that each hold one request: its committed positions, its canvas, its rule's state.

    A slot is admitted to, reads its prompt in pieces, and then for each canvas is started, passed until a status says
    done, and reads what is committed. Only `poll` waits for the device.
    """

    device: torch.device
    slots: int
    capacity: int  # positions a slot can hold
    short: int  # pieces of up to so many tokens may share a read; longer ones are read alone,
    piece: int  # so many tokens at a time

    def admit(
        self, slot: int, owner: int, rule: Rule, settings: DecodeSettings, seed: int, *, keep: bool, positions: int
    ) -> None:
        """Give a slot to a request that needs `positions`. keep: it continues after the slot's committed positions."""

    def read(self, pieces: Mapping[int, Sequence[int]]) -> None:
        """One encode pass that appends tokens to the committed positions of each of these slots."""

    def start(self, slots: Sequence[int]) -> None:
        """Begin the next canvas of these slots."""

    def run_pass(self, slots: Sequence[int]) -> None:
        """Launch one denoising pass of these slots, all of one rule, and ask for their status."""

    def poll(self, drain: bool = False) -> list[SlotStatus]:
        """Statuses of the oldest pass not yet reported; none while only the newest is on its way, unless drained."""

    def release(self, slot: int) -> None:
        """The slot's request is over, done or not. Its committed positions stay until the slot is admitted to."""

    def reset(self) -> None:
        """Empty all slots, also those whose requests were abandoned in the middle."""

    def close(self) -> None:
        """Give all memory back at once. The runner is of no use afterwards."""


def admit_prompts(runner: Runner, prompts: Sequence[list[int]], rule: Rule, settings: DecodeSettings) -> None:
    """Give each of the first slots a prompt, read whole, and its number as seed, for a benchmark."""
    for slot, prompt in enumerate(prompts):
        runner.admit(slot, slot, rule, settings, slot, keep=False, positions=len(prompt))
        read_whole(runner, slot, prompt)


def read_whole(runner: Runner, slot: int, prompt: list[int]) -> None:
    """All the pieces of a prompt, one after the other."""
    for start in range(0, len(prompt), runner.piece):
        runner.read({slot: prompt[start : start + runner.piece]})
