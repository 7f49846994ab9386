"""The one loop: requests join and leave between passes. It knows no text and no threads."""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from redraft.config import DecodeSettings, ModelConfig
from redraft.decode.rule import Rule
from redraft.device import peak_bytes, reset_peak
from redraft.engine.events import Committed, Draft, Event, Result, count_tokens, cut
from redraft.engine.runner import Runner, SlotStatus
from redraft.errors import UsageError


@dataclass(frozen=True)
class Request:
    """What one answer is made of: token ids of the prompt, and how to go on from there."""

    prompt: Sequence[int]
    rule: Rule
    settings: DecodeSettings
    seed: int
    drafts: bool = True  # whether it wants an event for every pass

    def positions(self, canvas_length: int) -> int:
        """Positions of its slot that will be committed at most; the last canvas never is."""
        return len(self.prompt) + (-(-self.settings.max_new_tokens // canvas_length) - 1) * canvas_length

    def check_fits(self, capacity: int, canvas_length: int) -> None:
        """Raise UsageError with the numbers when it needs more than `capacity` positions."""
        needed = self.positions(canvas_length)
        if needed > capacity:
            raise UsageError(
                f"prompt of {len(self.prompt)} tokens and max_new_tokens {self.settings.max_new_tokens} need {needed} "
                f"positions, a slot has {capacity}; shorten the prompt, lower max_new_tokens or load with a larger "
                "context"
            )


@dataclass
class _Running:
    """A request that has a slot."""

    id: int
    request: Request
    slot: int
    unread: list[int]  # of the prompt, or of the canvas to commit
    cached: int
    began: float
    denoising: bool = False
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # passes of each canvas


class Loop:
    """Requests over the slots of a runner.

    `add` puts a request in line, `step` moves everything on by at most one encode pass of short pieces, one piece of a
    long prompt and one denoising pass, and returns what happened as (id, event). Not safe for several threads.

    A slot keeps what its last request committed. A request whose prompt begins with all of that goes on there and reads
    the rest only; other requests take empty slots first, then the one that was given up longest ago.
    """

    def __init__(self, runner: Runner, config: ModelConfig):
        self.runner, self.config = runner, config
        self._ids = itertools.count()
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: dict[int, _Running] = {}  # by slot, in the order of admission
        self._cancelled: set[int] = set()
        self._resident: list[list[int]] = [[] for _ in range(runner.slots)]
        self._given_up = [0] * runner.slots  # in the order of this count
        self._clock = itertools.count(1)
        self.width = 0  # requests in the last step's pass

    @property
    def idle(self) -> bool:
        """Whether no request is in line or running."""
        return not self.live

    @property
    def live(self) -> int:
        """Requests in line or running."""
        return len(self._waiting) + len(self._running)

    def add(self, request: Request) -> int:
        """Put a request in line; returns its id. Raises UsageError with the numbers when no slot can ever hold it."""
        request.check_fits(self.runner.capacity, self.config.canvas_length)
        number = next(self._ids)
        self._waiting.append((number, request))
        return number

    def cancel(self, number: int) -> None:
        """Drop a request, with the next step; no more events come of it. An id that is over is ignored."""
        self._cancelled.add(number)

    def step(self) -> list[tuple[int, Event]]:
        """Release and admit, read, pass, poll, cut and commit."""
        self._release_cancelled()
        self._admit()
        self._read()
        denoising = [r for r in self._running.values() if r.denoising]
        self.width = len(denoising)
        for rule in dict.fromkeys(r.request.rule for r in denoising):
            self.runner.run_pass([r.slot for r in denoising if r.request.rule is rule])
        events: list[tuple[int, Event]] = []
        for status in self.runner.poll(drain=not denoising):
            running = self._running.get(status.slot)
            if running is not None and _is_news(status, running):
                events += ((running.id, event) for event in self._after_pass(running, status))
        return events

    def reset(self) -> None:
        """Forget every request and every prefix, wherever a step was interrupted."""
        self.runner.reset()
        self._waiting.clear()
        self._running.clear()
        self._cancelled.clear()
        self._resident = [[] for _ in range(self.runner.slots)]

    def _release_cancelled(self) -> None:
        self._waiting = deque(entry for entry in self._waiting if entry[0] not in self._cancelled)
        for running in [r for r in self._running.values() if r.id in self._cancelled]:
            self._release(running)
        self._cancelled.clear()

    def _admit(self) -> None:
        if self._waiting and not self._running:
            reset_peak(self.runner.device)
        while self._waiting and len(self._running) < self.runner.slots:
            number, request = self._waiting.popleft()
            prompt = list(request.prompt)
            slot, cached = self._choose_slot(prompt)
            began = time.perf_counter()
            self.runner.admit(
                slot, number, request.rule, request.settings, request.seed,
                keep=cached > 0, positions=request.positions(self.config.canvas_length),
            )  # fmt: skip
            if not cached:
                self._resident[slot] = []
            self._running[slot] = _Running(number, request, slot, prompt[cached:], cached, began)

    def _choose_slot(self, prompt: list[int]) -> tuple[int, int]:
        """A free slot, and how many of the prompt's tokens it holds."""

        def cached(slot: int) -> int:
            resident = self._resident[slot]
            return len(resident) if prompt[: len(resident)] == resident else 0

        free = [slot for slot in range(self.runner.slots) if slot not in self._running]
        best = min(free, key=lambda s: (-cached(s), bool(self._resident[s]), self._given_up[s]))
        return best, cached(best)

    def _read(self) -> None:
        """Encode what is short together and one piece of the first that is long; start the canvases that are due."""
        runner = self.runner
        unread = [r for r in self._running.values() if r.unread]
        together = [r for r in unread if len(r.unread) <= runner.short]
        alone = [r for r in unread if len(r.unread) > runner.short][:1]
        for readers in filter(None, (together, alone)):
            pieces = {r.slot: r.unread[: runner.piece] for r in readers}
            runner.read(pieces)
            for reader in readers:
                self._resident[reader.slot] += pieces[reader.slot]
                reader.unread = reader.unread[runner.piece :]
        due = [r for r in self._running.values() if not r.unread and not r.denoising]
        if due:
            runner.start([r.slot for r in due])
        for running in due:
            running.denoising = True
            running.steps.append(0)

    def _after_pass(self, running: _Running, status: SlotStatus) -> list[Event]:
        running.steps[-1] = status.step
        canvas = len(running.steps) - 1
        events: list[Event] = []
        if running.request.drafts:
            events.append(Draft(canvas, status.step, status.argmax, status.accepted, status.mean_entropy))
        if status.done:
            settings = running.request.settings
            room = settings.max_new_tokens - len(running.tokens)
            tokens, reason = cut(status.argmax, settings.eos_token_ids, room)
            running.tokens += tokens
            events.append(Committed(canvas, status.step, tokens, reason))
            running.denoising = False
            if reason is None:
                running.unread = status.argmax
            else:
                events.append(self._result(running, reason))
                self._release(running)
        return events

    def _result(self, running: _Running, reason: str) -> Result:
        request, seconds = running.request, time.perf_counter() - running.began
        return Result(
            running.tokens, count_tokens(running.tokens, self.config.pad_token_id), len(request.prompt), running.steps,
            seconds, reason, request.seed, peak_bytes(self.runner.device), cached_tokens=running.cached,
        )  # fmt: skip

    def _release(self, running: _Running) -> None:
        self.runner.release(running.slot)
        del self._running[running.slot]
        self._given_up[running.slot] = next(self._clock)


def _is_news(status: SlotStatus, running: _Running) -> bool:
    """Whether a status is of this request's present canvas and not of a pass that ran when it was already done."""
    current = status.owner == running.id and running.denoising and status.canvas == len(running.steps) - 1
    return current and status.step > running.steps[-1]
