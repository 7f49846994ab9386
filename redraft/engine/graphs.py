"""Requests in slots, denoised together: a whole pass is one CUDA graph over fixed buffers.

Nothing in a pass waits for the host. The host replays the graph and reads one small status tensor a pass late; a slot
whose canvas is done keeps it, whatever passes were already on their way. On a CPU, where Triton's interpreter runs the
kernels, the same passes are launched one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from redraft.config import DecodeSettings
from redraft.errors import MemoryShortage
from redraft.kernels.acceptance import finish_pass, start_canvas
from redraft.kernels.sampling import PROBABILITIES, SAMPLE, probabilities, sample
from redraft.kernels.self_conditioning import SelfConditioningBuffers, self_condition
from redraft.kernels.state import OUT_OF_STEPS, Canvases, SlotState
from redraft.kernels.tables import settings_for
from redraft.network.arena import SlotArena
from redraft.network.fused import Buffers, FusedModel

PIECE = 1024  # prompt rows a pass, where a prompt has more than a canvas: 64 rows an expert at 128 experts, 8 chosen


@dataclass(frozen=True)
class SlotStatus:
    """Where a slot stood after a pass: whether its canvas is done, passes so far, and what a draft shows of it."""

    slot: int
    done: bool
    canvas: int  # from 0
    step: int  # from 1
    argmax: list[int]
    accepted: list[bool]
    mean_entropy: float


class PassGraph:
    """A sequence of launches, captured once and replayed; on a CPU simply run.

    Graphs that are never replayed at the same time share the memory of one `pool` (torch.cuda.graph_pool_handle); None
    is memory of its own.
    """

    def __init__(self, launches: Callable[[], object], device: torch.device, pool: Any = None):
        self._launches, self._graph = launches, None
        if device.type != "cuda":
            return
        # Ahead of the model's second stream, whose launches should only fill what these leave.
        stream = torch.cuda.Stream(device, priority=-1)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels compile and libraries plan before anything is captured
                launches()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with _own_workspaces(), torch.cuda.graph(self._graph, pool=pool, stream=stream):
            launches()

    def replay(self) -> None:
        if self._graph is None:
            self._launches()
        else:
            self._graph.replay()


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Have the matrix library take the workspaces of a capture from the graph's own memory.

    torch keeps one for each stream and gives all of them up when any other graph of the stream is deleted, or when
    torch.compile captures one; a graph that was captured with such a workspace would write into memory of others.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class SlotRunner:
    """Up to `slots` requests of at most `capacity` positions each, at their own steps and lengths.

    Use: `admit` a prompt into a slot, `run_pass` until `poll` reports the slot done, then `commit` its canvas and
    `start` the next one. `reset` comes before the first request of a batch. Raises MemoryShortage when memory
    is too short.
    """

    def __init__(self, model: FusedModel, slots: int, capacity: int):
        self.model, self.slots, self.capacity = model, slots, capacity
        self.config, device = model.config, model.device
        self.piece = max(min(PIECE, capacity), self.config.canvas_length)
        self._check_memory()
        self.arena = SlotArena.allocate(self.config, slots, capacity, self.piece, torch.bfloat16, device)
        self.state = SlotState.allocate(slots, device)
        self.canvases = Canvases.allocate(slots, self.config.canvas_length, device)
        self.work = _DenoiseBuffers(model, slots, capacity, device)
        self._select = torch.zeros(slots, dtype=torch.int32, device=device)
        self._all = torch.arange(slots, dtype=torch.int32, device=device)
        self._readers = {n: _Reader(model, n, device) for n in {self.config.canvas_length, self.piece}}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._encodes: dict[tuple[int, int], PassGraph] = {}
        self._pass: PassGraph | None = None
        self._pending: list[_Snapshot] = []

    def reset(self) -> None:
        """Empty all slots, also those whose requests were abandoned in the middle."""
        self._pending.clear()
        self.state.done.fill_(OUT_OF_STEPS)

    def admit(self, slot: int, prompt: list[int], settings: DecodeSettings, seed: int) -> None:
        """Read a prompt into an empty slot and begin its first canvas."""
        self._prepare()
        self.arena.length[slot] = 0
        self.state.configure(slot, settings, seed)
        while prompt:
            size = self.piece if len(prompt) > self.config.canvas_length else self.config.canvas_length
            self._encode(slot, prompt[:size], size)
            prompt = prompt[size:]
        self._start(slot)

    def start(self, slot: int) -> None:
        """Begin a slot's next canvas."""
        self.state.canvas_index[slot] += 1
        self._start(slot)

    def run_pass(self) -> None:
        """Launch one denoising pass of every slot that is not done, and ask for its status."""
        assert self._pass is not None, "a slot was admitted"
        self._pass.replay()
        self._pending.append(_Snapshot(self.canvases))

    def poll(self, drain: bool = False) -> list[SlotStatus] | None:
        """Status of all slots after the oldest pass not yet reported; None while only the newest is on its way."""
        if not self._pending or (len(self._pending) < 2 and not drain):
            return None
        return self._pending.pop(0).read(self.slots)

    def commit(self, slot: int, tokens: list[int]) -> None:
        """Make a finished canvas, the ids of one canvas length, part of the slot's prefix."""
        self._encode(slot, tokens, self.config.canvas_length)

    def denoise(self) -> None:
        """One pass over all slots: every launch of it, in order."""
        config, model, w = self.config, self.model, self.work
        embed = model.weights.embed
        self._set_temperature()
        model.embed(self.canvases.tokens, w.rows, self._all, w.signal, self.state.step)
        model.run_layers(w.rows, self.arena, self._all, causal=False)
        torch.mm(w.rows.next_in, embed.t(), out=w.logits)
        self.sample()
        self_condition(
            w.logits, embed, model.weights.self_conditioning, model.conditioning_gate_up, self.state.done, self._all,
            model.embed_scale, config.rms_norm_eps, w.conditioning, w.signal,
        )  # fmt: skip

    def _set_temperature(self) -> None:
        state = self.state
        share = ((state.max_steps - state.step).double() / state.max_steps).float()
        state.temperature.copy_(state.t_min.float() + (state.t_max - state.t_min).float() * share)

    def sample(self) -> None:
        """From the raw logits in `work` to the next canvas: statistics, probabilities, acceptance and stop test."""
        config, w, length = self.config, self.work, self.config.canvas_length
        sample(
            w.logits, self.state, self._all, config.final_logit_softcap,
            draw=w.draw, argmax=w.argmax, entropy=w.entropy, confidence=w.confidence, log_norm=w.log_norm,
            settings=w.sample_settings,
        )  # fmt: skip
        # In place: the raw logits have been read, and the next pass wants their probabilities.
        probabilities(
            w.logits, w.log_norm, self.state, self._all, config.final_logit_softcap,
            out=w.logits, settings=w.probability_settings,
        )  # fmt: skip
        finish_pass(w.draw, w.argmax, w.entropy, self.state, self.canvases, length, config.vocab_size)

    def _prepare(self) -> None:
        if self._pass is None:
            # Every slot is done as allocated, so the warm-up passes change nothing.
            self._pass = PassGraph(self.denoise, self.model.device, self._pool)

    def _start(self, slot: int) -> None:
        self._select.zero_()
        self._select[slot] = 1
        start_canvas(self._select, self.state, self.canvases, self.config.canvas_length, self.config.vocab_size)

    def _encode(self, slot: int, tokens: list[int], size: int) -> None:
        """Read `tokens` into a slot's prefix with a pass of `size` rows; rows after the tokens are computed in vain."""
        reader, key = self._readers[size], (slot, size)
        if key not in self._encodes:
            reader.count.zero_()  # the warm-up passes commit nothing
            lane = self._all[slot : slot + 1]
            self._encodes[key] = PassGraph(lambda: reader.run(self.arena, lane), self.model.device, self._pool)
        reader.fill(tokens)
        self._encodes[key].replay()

    def _check_memory(self) -> None:
        if self.model.device.type != "cuda":
            return
        needed, free = planned_bytes(self.model, self.slots, self.capacity, self.piece), torch.cuda.mem_get_info()[0]
        if needed > free:
            torch.cuda.empty_cache()  # torch keeps what was freed, and the device does not count it
            free = torch.cuda.mem_get_info()[0]
        if needed > free:
            raise MemoryShortage(
                f"{self.slots} requests of {self.capacity} positions need {needed / 2**30:.1f} GiB beside the weights, "
                f"{free / 2**30:.1f} GiB are free; use fewer requests, shorter prompts or a lower max_new_tokens"
            )


class _Reader:
    """Encode passes of `size` rows of one slot, over fixed tokens and a fixed count."""

    def __init__(self, model: FusedModel, size: int, device: torch.device):
        self._model = model
        self._buffers = Buffers(model, 1, size)
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)

    def fill(self, tokens: list[int]) -> None:
        self._tokens[: len(tokens)] = torch.tensor(tokens, device=self._tokens.device)
        self.count.fill_(len(tokens))

    def run(self, arena: SlotArena, slots: torch.Tensor) -> None:
        self._model.embed(self._tokens, self._buffers)
        self._model.run_layers(self._buffers, arena, slots, causal=True)
        self._model.commit(arena, slots, self.count)


class _DenoiseBuffers:
    """What a denoise pass writes besides the canvases."""

    def __init__(self, model: FusedModel, slots: int, capacity: int, device: torch.device):
        config = model.config
        rows = slots * config.canvas_length
        self.rows = Buffers(model, slots, config.canvas_length, device)
        if "full" in self.rows.heads:
            self.rows.heads["full"].plan_canvases(capacity)
        self.conditioning = SelfConditioningBuffers.allocate(
            rows, config.hidden_size, config.intermediate_size, torch.bfloat16, device
        )
        self.signal = torch.empty(rows, config.hidden_size, dtype=torch.bfloat16, device=device)
        self.logits = torch.empty(rows, config.vocab_size, dtype=torch.bfloat16, device=device)
        self.draw, self.argmax = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        self.entropy, self.confidence, self.log_norm = (torch.zeros(rows, device=device) for _ in range(3))
        self.sample_settings = settings_for("sampling.statistics", SAMPLE)
        self.probability_settings = settings_for("sampling.probabilities", PROBABILITIES)


class _Snapshot:
    """A copy of the canvases' status on its way to the host."""

    def __init__(self, canvases: Canvases):
        pinned = canvases.status.is_cuda
        sources = (canvases.status, canvases.argmax, canvases.accepted, canvases.entropy)
        self._parts = [torch.empty(s.shape, dtype=s.dtype, pin_memory=pinned) for s in sources]
        for part, source in zip(self._parts, sources, strict=True):
            part.copy_(source, non_blocking=True)
        self._event = torch.cuda.Event() if pinned else None
        if self._event is not None:
            self._event.record()

    def read(self, slots: int) -> list[SlotStatus]:
        if self._event is not None:
            self._event.synchronize()
        status, argmax, accepted, entropy = (part.view(slots, -1) for part in self._parts)
        return [
            SlotStatus(
                slot=slot,
                done=bool(status[slot, 0]),
                canvas=int(status[slot, 3]),
                step=int(status[slot, 1]),
                argmax=argmax[slot].tolist(),
                accepted=accepted[slot].bool().tolist(),
                mean_entropy=float(entropy[slot].mean()),
            )
            for slot in range(slots)
        ]


def planned_bytes(model: FusedModel, slots: int, capacity: int, piece: int) -> int:
    """Bytes of arena and buffers for `slots` requests whose prompts are read in pieces of `piece` rows."""
    meta, config, length = torch.device("meta"), model.config, model.config.canvas_length
    arena = SlotArena.allocate(config, slots, capacity, piece, torch.bfloat16, meta)
    readers = [Buffers(model, 1, n, meta) for n in {length, piece}]
    parts = [arena, _DenoiseBuffers(model, slots, capacity, meta), *readers]
    return sum(_tensor_bytes(part) for part in parts)


def _tensor_bytes(node: Any) -> int:
    if isinstance(node, torch.Tensor):
        return node.numel() * node.element_size()
    if isinstance(node, dict):
        node = list(node.values())
    if isinstance(node, list | tuple):
        return sum(_tensor_bytes(item) for item in node)
    return sum(_tensor_bytes(item) for item in vars(node).values()) if hasattr(node, "__dict__") else 0
