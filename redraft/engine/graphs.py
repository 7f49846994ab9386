"""Requests in slots, denoised together: a whole pass is one CUDA graph over fixed buffers.

Nothing in a pass waits for the host. The host replays the graph and reads one small status tensor a pass late; a slot
whose canvas is done keeps it, whatever passes were already on their way. Passes are captured for several widths, all of
them before the first request; the narrowest that holds the slots asked for is replayed, with a table of which slot each
lane is. On a CPU, where Triton's interpreter runs the kernels, the same passes are launched one by one.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from redraft.config import DecodeSettings
from redraft.decode.rule import DEFAULT_RULE, Rule, find_rule
from redraft.engine.runner import PIECE, SlotStatus
from redraft.errors import MemoryShortage
from redraft.kernels.state import OUT_OF_STEPS, Canvases, SlotState
from redraft.network.arena import SlotArena
from redraft.network.fused import Buffers, DenoisePass, FusedModel

_CAPTURING = threading.Lock()  # captures share the state of one GPU


class PassGraph:
    """A sequence of launches, captured once and replayed; on a CPU simply run.

    Graphs that are never replayed at the same time share the memory of one `pool` (torch.cuda.graph_pool_handle); None
    is memory of its own. The launches are not kept: what they belong to may own this graph, and must be freed, graph
    and all, the moment that nobody uses it, not by a garbage collection in the middle of another capture.
    """

    def __init__(self, launches: Callable[[], object], device: torch.device, pool: Any = None):
        self._launches: Callable[[], object] | None = launches
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            return
        self._launches = None
        # Ahead of the model's second stream, whose launches should only fill what these leave.
        stream = torch.cuda.Stream(device, priority=-1)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels compile and libraries plan before anything is captured
                launches()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with _nothing_else(), torch.cuda.graph(
            self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        ):  # fmt: skip
            launches()

    def replay(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif self._launches is not None:
            self._launches()


@contextmanager
def _nothing_else() -> Iterator[None]:
    """Capture with no garbage collected meanwhile and with the matrix library's workspaces in the graph's own memory.

    A graph that is freed during a capture makes it fail, and with it all later ones. torch keeps a workspace for each
    stream and gives all of them up when any other graph of the stream is deleted, or when torch.compile captures one; a
    graph that was captured with such a workspace would write into memory of others.
    """
    with _CAPTURING:
        collected = gc.isenabled()
        gc.disable()
        torch._C._cuda_clearCublasWorkspaces()
        try:
            yield
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            if collected:
                gc.enable()


def widths(slots: int) -> list[int]:
    """Widths of captured passes: powers of two, and `slots` itself."""
    return [*(1 << i for i in range(slots.bit_length()) if 1 << i < slots), slots]


class GraphRunner:
    """Up to `slots` requests of at most `capacity` positions each, at their own steps and lengths (engine/runner.py).

    rules: those whose passes are captured, by default the official one. Encode passes are captured now too, or with
    their first use if `later`: a first answer seldom needs all of them. Raises MemoryShortage when memory is too short,
    before any of it is taken.
    """

    def __init__(
        self, model: FusedModel, slots: int, capacity: int, rules: Sequence[Rule] | None = None, *, later: bool = False
    ):
        self.model, self.slots, self.capacity, self.device = model, slots, capacity, model.device
        config, device = model.config, model.device
        self.short, self.piece = config.canvas_length, piece_rows(model, capacity)
        _check_memory(model, slots, capacity)
        self.arena = SlotArena.allocate(config, slots, capacity, self.piece, torch.bfloat16, device)
        self.state = SlotState.allocate(slots, device)
        self.canvases = Canvases.allocate(slots, config.canvas_length, device)
        self.signal = _signal(model, slots, device)
        self.work = _Work(model, slots, capacity, device)
        self._own = {rule: self._allocate(rule) for rule in _official(rules)}
        self._rules: dict[int, Rule] = {}
        self._owners: dict[int, int] = {}
        self._pending: list[_Snapshot] = []
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        capture = self._capture = partial(_capture, model, device, pool)
        # Every slot is done as allocated and no lane has tokens, so that the warm-up passes change nothing.
        self._passes = {
            (rule, width): capture(partial(self.work.denoise, width, rule, own, *self._shared()))
            for rule, own in self._own.items()
            for width in reversed(widths(slots))
        }
        self._encodes: dict[_Reader, PassGraph] = {}
        for reader in () if later else self.work.readers():
            self._encode(reader)

    def own(self, rule: Rule) -> Any:
        """The tensors of a rule, as its `allocate` returned them."""
        return self._own[rule]

    def _allocate(self, rule: Rule) -> Any:
        return rule.allocate(self.slots, self.model.config.canvas_length, self.model.config.vocab_size, self.device)

    def _shared(self) -> tuple[Any, ...]:
        return self.model, self.arena, self.state, self.canvases, self.signal

    def admit(
        self, slot: int, owner: int, rule: Rule, settings: DecodeSettings, seed: int, *, keep: bool, positions: int
    ) -> None:
        assert positions <= self.capacity, "the loop refuses what does not fit"
        if not keep:
            self.arena.length[slot] = 0
        self.state.admit(slot, seed)
        rule.configure(self._own[rule], slot, settings)
        self._rules[slot], self._owners[slot] = rule, owner

    def read(self, pieces: Mapping[int, Sequence[int]]) -> None:
        longest = max(map(len, pieces.values()))
        reader = self.work.reader(len(pieces), longest)
        graph = self._encode(reader)
        reader.fill(pieces, self.slots)
        graph.replay()

    def _encode(self, reader: _Reader) -> PassGraph:
        """The captured passes of a reader; no lane of one that was never filled has tokens."""
        if reader not in self._encodes:
            self._encodes[reader] = self._capture(partial(reader.run, self.model, self.arena))
        return self._encodes[reader]

    def start(self, slots: Sequence[int]) -> None:
        for rule in dict.fromkeys(self._rules[slot] for slot in slots):
            table = _uploaded([slot for slot in slots if self._rules[slot] is rule], torch.int32, self.device)
            rule.start(table, self.state, self._own[rule], self.canvases)

    def run_pass(self, slots: Sequence[int]) -> None:
        rule, left = self._rules[slots[0]], list(slots)
        # Lanes that are left over take slots whose canvas is done. Other rules may have too few of those.
        idle = [s for s in range(self.slots) if s not in slots and s not in self._others(rule)]
        while left:
            fitting = [w for w in widths(self.slots) if len(left) <= w <= len(left) + len(idle)]
            width = fitting[0] if fitting else max(w for w in widths(self.slots) if w <= len(left))
            lanes, left = left[:width], left[width:]
            self.work.lanes[width].set([*lanes, *idle[: width - len(lanes)]])
            self._passes[rule, width].replay()
        self._pending.append(_Snapshot(self.canvases, {slot: self._owners[slot] for slot in slots}))

    def _others(self, rule: Rule) -> list[int]:
        return [slot for slot in self._owners if self._rules[slot] is not rule]

    def poll(self, drain: bool = False) -> list[SlotStatus]:
        if not self._pending or (len(self._pending) < 2 and not drain):
            return []
        return self._pending.pop(0).read()

    def release(self, slot: int) -> None:
        self._owners.pop(slot, None)
        self.state.done[slot] = OUT_OF_STEPS

    def reset(self) -> None:
        self._pending.clear()
        self._owners.clear()
        self.state.done.fill_(OUT_OF_STEPS)

    def close(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.__dict__.clear()  # graphs, buffers and the arena: nothing else holds them
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _capture(model: FusedModel, device: torch.device, pool: Any, launches: Callable[[], object]) -> PassGraph:
    with model.products.trying():
        return PassGraph(launches, device, pool)


def _official(rules: Sequence[Rule] | None) -> Sequence[Rule]:
    return (find_rule(DEFAULT_RULE),) if rules is None else rules


def piece_rows(model: FusedModel, capacity: int) -> int:
    """Rows of an encode pass of a prompt's piece: whole canvases, for the products of `kernels/products.py`."""
    canvas = model.config.canvas_length
    return -(-max(min(PIECE, capacity), canvas) // canvas) * canvas


class _Work:
    """What passes of each width write besides the slots' own state. No two of them run at the same time."""

    def __init__(self, model: FusedModel, slots: int, capacity: int, device: torch.device):
        config = model.config
        length, self.piece = config.canvas_length, piece_rows(model, capacity)
        logits = torch.empty(slots * length, config.vocab_size, dtype=torch.bfloat16, device=device)
        self.length = length
        self.rows = {width: Buffers(model, width, length, device) for width in widths(slots)}
        self.passes = {w: DenoisePass(model, rows, capacity, logits[: w * length]) for w, rows in self.rows.items()}
        self.lanes = {width: _Lanes(width, device) for width in widths(slots)}
        self._readers = {width: _Reader(rows, device) for width, rows in self.rows.items()}
        long = self._readers[1] if self.piece == length else _Reader(Buffers(model, 1, self.piece, device), device)
        self._long = long

    def readers(self) -> list[_Reader]:
        """One for each width of short pieces, and one for a long piece."""
        return list(dict.fromkeys((*self._readers.values(), self._long)))

    def reader(self, pieces: int, longest: int) -> _Reader:
        """The smallest that holds so many pieces."""
        if longest > self.length:
            assert pieces == 1, "long pieces are read alone"
            return self._long
        return self._readers[min(width for width in self._readers if width >= pieces)]

    def denoise(
        self,
        width: int,
        rule: Rule,
        own: Any,
        model: FusedModel,
        arena: SlotArena,
        state: SlotState,
        canvases: Canvases,
        signal: torch.Tensor,
    ) -> None:
        """A pass of the slots in the lanes of that width, every launch of it, in order."""
        table, work = self.lanes[width].table, self.passes[width]
        work.run(model, table, arena, state, canvases.tokens, signal)
        rule.step(work.statistics, table, state, own, canvases)


class _Lanes:
    """Which slot each lane of a width is, on the device."""

    def __init__(self, width: int, device: torch.device):
        self._slots = list(range(width))
        self.table = torch.arange(width, dtype=torch.int32, device=device)

    def set(self, slots: list[int]) -> None:
        if slots != self._slots:
            self._slots = slots
            self.table.copy_(_pinned(slots, torch.int32, self.table.device), non_blocking=True)


class _Reader:
    """Encode passes of pieces of several slots, over fixed tokens and fixed counts."""

    def __init__(self, buffers: Buffers, device: torch.device):
        self._buffers, self._size = buffers, buffers.count
        self._lanes = _Lanes(buffers.lanes, device)
        self._tokens = torch.zeros(buffers.lanes * buffers.count, dtype=torch.int64, device=device)
        self._counts = torch.zeros(buffers.lanes, dtype=torch.int32, device=device)

    def fill(self, pieces: Mapping[int, Sequence[int]], slots: int) -> None:
        """Rows after a piece's tokens, and lanes without a piece, are computed in vain."""
        idle = [slot for slot in range(slots) if slot not in pieces]
        spare = self._buffers.lanes - len(pieces)
        self._lanes.set([*pieces, *idle[:spare]])
        rows = [token for piece in pieces.values() for token in [*piece, *[0] * (self._size - len(piece))]]
        counts = [*map(len, pieces.values()), *[0] * spare]
        self._tokens[: len(rows)].copy_(_pinned(rows, torch.int64, self._tokens.device), non_blocking=True)
        self._counts.copy_(_pinned(counts, torch.int32, self._tokens.device), non_blocking=True)

    def run(self, model: FusedModel, arena: SlotArena) -> None:
        model.embed(self._tokens, self._buffers)
        model.run_layers(self._buffers, arena, self._lanes.table, causal=True)
        model.commit(arena, self._lanes.table, self._counts)


class _Snapshot:
    """A copy of the canvases' status on its way to the host, of slots and who owned them when it was made."""

    def __init__(self, canvases: Canvases, owners: dict[int, int]):
        self._owners, self._slots = owners, canvases.status.shape[0]
        pinned = canvases.status.is_cuda
        sources = (canvases.status, canvases.argmax, canvases.accepted, canvases.entropy)
        self._parts = [torch.empty(s.shape, dtype=s.dtype, pin_memory=pinned) for s in sources]
        for part, source in zip(self._parts, sources, strict=True):
            part.copy_(source, non_blocking=True)
        self._event = torch.cuda.Event() if pinned else None
        if self._event is not None:
            self._event.record()

    def read(self) -> list[SlotStatus]:
        if self._event is not None:
            self._event.synchronize()
        status, argmax, accepted, entropy = (part.view(self._slots, -1) for part in self._parts)
        return [
            SlotStatus(
                slot=slot,
                owner=owner,
                done=bool(status[slot, 0]),
                canvas=int(status[slot, 3]),
                step=int(status[slot, 1]),
                argmax=argmax[slot].tolist(),
                accepted=accepted[slot].bool().tolist(),
                mean_entropy=float(entropy[slot].mean()),
            )
            for slot, owner in self._owners.items()
        ]


def _pinned(values: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor on the host whose copy to the device does not wait."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def _uploaded(values: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return _pinned(values, dtype, device).to(device, non_blocking=True)


def _signal(model: FusedModel, slots: int, device: torch.device) -> torch.Tensor:
    """The self-conditioning signal of each slot's next pass, [S * C, H]."""
    rows = slots * model.config.canvas_length
    return torch.zeros(rows, model.config.hidden_size, dtype=torch.bfloat16, device=device)


def planned_bytes(model: FusedModel, slots: int, capacity: int) -> int:
    """Bytes of arena and buffers of a runner."""
    meta = torch.device("meta")
    arena = SlotArena.allocate(model.config, slots, capacity, piece_rows(model, capacity), torch.bfloat16, meta)
    parts = [arena, _signal(model, slots, meta), _Work(model, slots, capacity, meta)]
    return sum({id(t): t.numel() * t.element_size() for t in _storages(parts)}.values())


def _check_memory(model: FusedModel, slots: int, capacity: int) -> None:
    if model.device.type != "cuda":
        return
    needed, free = planned_bytes(model, slots, capacity), torch.cuda.mem_get_info()[0]
    if needed > free:
        torch.cuda.empty_cache()  # torch keeps what was freed, and the device does not count it
        free = torch.cuda.mem_get_info()[0]
    if needed > free:
        raise MemoryShortage(
            f"{slots} requests of {capacity} positions need {needed / 2**30:.1f} GiB beside the weights, "
            f"{free / 2**30:.1f} GiB are free; use fewer requests, shorter prompts or a lower max_new_tokens"
        )


def _storages(node: Any) -> Iterator[torch.Tensor]:
    """Every tensor below a node, views as the whole that they are of."""
    if isinstance(node, torch.Tensor):
        yield node if node._base is None else node._base
    elif isinstance(node, dict):
        yield from _storages(list(node.values()))
    elif isinstance(node, list | tuple):
        for item in node:
            yield from _storages(item)
    elif hasattr(node, "__dict__") and not isinstance(node, FusedModel):
        yield from _storages(list(vars(node).values()))
