"""A runner without a network: it checks what the loop asks of it, reports a pass late, and answers by arithmetic."""

from collections.abc import Mapping, Sequence

import torch

from redraft.engine.runner import SlotStatus

CANVAS, PIECE = 4, 8


class FakeRunner:
    """Canvas c of a request with seed s is [s, s + c, c, 50] after `max_denoising_steps` passes, or [1, ...] to end."""

    device = torch.device("cpu")
    short, piece = CANVAS, PIECE

    def __init__(self, slots: int, capacity: int = 100, canvases: int = 2):
        self.slots, self.capacity, self.canvases = slots, capacity, canvases
        self.committed: list[list[int]] = [[] for _ in range(slots)]
        self.requests: dict[int, dict] = {}
        self.reads: list[dict[int, int]] = []
        self.passes: list[list[int]] = []
        self.pending: list[list[SlotStatus]] = []
        self.closed = False

    def admit(self, slot, owner, rule, settings, seed, *, keep, positions):
        assert slot not in self.requests and positions <= self.capacity
        if not keep:
            self.committed[slot] = []
        steps = settings.max_denoising_steps
        self.requests[slot] = {"owner": owner, "seed": seed, "steps": steps, "canvas": -1, "step": 0}

    def read(self, pieces: Mapping[int, Sequence[int]]) -> None:
        longest = max(map(len, pieces.values()))
        assert 0 < longest <= PIECE and (len(pieces) == 1 or longest <= CANVAS)
        self.reads.append({slot: len(tokens) for slot, tokens in pieces.items()})
        for slot, tokens in pieces.items():
            self.committed[slot] += tokens
            assert len(self.committed[slot]) <= self.capacity

    def start(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.requests[slot].update(canvas=self.requests[slot]["canvas"] + 1, step=0)

    def run_pass(self, slots: Sequence[int]) -> None:
        self.passes.append(list(slots))
        self.pending.append([self._status(slot, self.requests[slot]) for slot in slots])

    def _status(self, slot: int, r: dict) -> SlotStatus:
        r["step"] = min(r["step"] + 1, r["steps"])  # one that is done keeps its canvas
        canvas = r["canvas"]
        tokens = [1, 9, 9, 9] if canvas + 1 == self.canvases else [r["seed"], r["seed"] + canvas, canvas, 50]
        done = r["step"] == r["steps"]
        return SlotStatus(slot, r["owner"], done, canvas, r["step"], tokens, [done] * CANVAS, 0.5)

    def poll(self, drain: bool = False) -> list[SlotStatus]:
        if not self.pending or (len(self.pending) < 2 and not drain):
            return []
        return self.pending.pop(0)

    def release(self, slot: int) -> None:
        del self.requests[slot]

    def reset(self) -> None:
        self.requests.clear()
        self.pending.clear()

    def close(self) -> None:
        self.closed = True
