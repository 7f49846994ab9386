"""Passes of the plain network (network/model.py), for a CPU and for whatever the fused kernels do not cover.

`EagerRunner` takes slots as they come, and a request's text does not depend on its company. `LockstepRunner` pads a
batch on the left and takes every canvas together, with torch's generator: what transformers computes, in its order, for
tiers `off` and `bitexact`.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from redraft.config import DecodeSettings
from redraft.decode.rule import Rule
from redraft.decode.streams import CounterStream, Stream, TorchStream
from redraft.engine.events import cut
from redraft.engine.runner import PIECE, SlotStatus
from redraft.kernels.products import ROW_MULTIPLE
from redraft.kernels.state import Canvases, SlotState
from redraft.network.arena import KVArena, PackedArenas
from redraft.network.model import Model


class Rows:
    """Requests that are at the same canvas and pass: their canvases, their rule's state, their draws.

    A row that is done keeps its canvas, argmax and self-conditioning; the others go on.
    """

    def __init__(self, model: Model, rule: Rule, settings: DecodeSettings, stream: Stream, arena: KVArena):
        self.model, self.rule, self.stream, self.arena = model, rule, stream, arena
        config, device, count = model.config, model.device, arena.batch
        self.state = SlotState.allocate(count, device)
        self.canvases = Canvases.allocate(count, config.canvas_length, device)
        self.own = rule.allocate(count, config.canvas_length, config.vocab_size, device)
        for row in range(count):
            rule.configure(self.own, row, settings)
        self._all = torch.arange(count, dtype=torch.int32, device=device)
        self._canvas, self._step = -1, 0
        self.self_conditioning: torch.Tensor | None = None  # the last pass's scaled logits [B, C, V]

    @property
    def canvas(self) -> torch.Tensor:
        """What the next pass reads, int64 [B, C]."""
        return self.canvases.tokens.view(self.arena.batch, -1)

    def running(self) -> list[int]:
        """Rows whose canvas is not done."""
        return (self.state.done == 0).nonzero().flatten().tolist()

    def start(self) -> None:
        """Begin the next canvas of every row."""
        self._canvas, self._step, self.self_conditioning = self._canvas + 1, 0, None
        self.rule.start(self._all, self.state, self.own, self.canvases, self.stream.tokens(self._canvas, 0))

    def run_pass(self) -> None:
        """One denoising pass."""
        self.take(self.model.denoise(self.canvas, self.arena, self.self_conditioning))

    def take(self, logits: torch.Tensor) -> None:
        """Move every row that is not done by a pass's soft-capped logits fp32 [B, C, V]."""
        self._step += 1
        running = self.state.done == 0
        scaled = logits / self.state.temperature[:, None, None]
        stats = self.stream.statistics(scaled, self._canvas, self._step)
        stats.redraw = self.stream.tokens(self._canvas, self._step)
        self.rule.step(stats, self._all, self.state, self.own, self.canvases)
        earlier = self.self_conditioning
        self.self_conditioning = scaled if earlier is None else torch.where(running[:, None, None], scaled, earlier)

    def status(self, row: int, slot: int, owner: int) -> SlotStatus:
        """What the host learns of a row."""
        done, step, _, canvas = self.canvases.status[row].tolist()
        length = self.model.config.canvas_length
        at = slice(row * length, (row + 1) * length)
        argmax, accepted = self.canvases.argmax[at].tolist(), self.canvases.accepted[at].bool().tolist()
        entropy = float(self.canvases.entropy[at].mean())
        return SlotStatus(slot, owner, bool(done), canvas, step, argmax, accepted, entropy)


class _Eager:
    """What the two runners below share."""

    def __init__(self, model: Model, slots: int):
        self.model, self.slots, self.device = model, slots, model.device
        self.capacity = model.config.max_position_embeddings
        self.owners: dict[int, int] = {}
        self._statuses: list[SlotStatus] = []

    def poll(self, drain: bool = False) -> list[SlotStatus]:
        statuses, self._statuses = self._statuses, []
        return statuses

    def release(self, slot: int) -> None:
        self.owners.pop(slot, None)

    def reset(self) -> None:
        self.owners.clear()
        self._statuses.clear()

    def close(self) -> None:
        self.reset()

    def _arena(self, batch: int, positions: int, padding: torch.Tensor | None = None) -> KVArena:
        model = self.model
        return KVArena(model.config, batch, positions, model.dtype, model.device, padding)


class EagerRunner(_Eager):
    """Slots of their own lengths, canvases and passes.

    On a CPU, where the network is batch invariant, those of a pass are one run of it; elsewhere they run one by one.
    """

    def __init__(self, model: Model, slots: int):
        super().__init__(Model(model.config, model.weights, batch_invariant=model.device.type == "cpu"), slots)
        self.short, self.piece = model.config.canvas_length, max(PIECE, model.config.canvas_length)
        self._rows: dict[int, Rows] = {}

    def admit(
        self, slot: int, owner: int, rule: Rule, settings: DecodeSettings, seed: int, *, keep: bool, positions: int
    ) -> None:
        config = self.model.config
        arena = self._rows[slot].arena if keep else self._arena(1, positions)
        arena.reserve(positions)
        stream = CounterStream([seed], config.canvas_length, config.vocab_size, self.device)
        self._rows[slot], self.owners[slot] = Rows(self.model, rule, settings, stream, arena), owner

    def read(self, pieces: Mapping[int, Sequence[int]]) -> None:
        for slots in self._runs(list(pieces)):
            tokens = [torch.tensor(pieces[slot], device=self.device) for slot in slots]
            self.model.encode(*self._packed(slots, tokens))

    def start(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._rows[slot].start()

    def run_pass(self, slots: Sequence[int]) -> None:
        # Whose canvas begins comes last: self-conditioning is of the first rows.
        begun = sorted(slots, key=lambda slot: self._rows[slot].self_conditioning is None)
        for run in self._runs(begun):
            self._denoise(run)
        self._statuses += [self._rows[slot].status(0, slot, self.owners[slot]) for slot in slots]

    def reset(self) -> None:
        super().reset()
        self._rows.clear()

    def _runs(self, slots: list[int]) -> list[list[int]]:
        """The slots of each run of the network."""
        return [slots] if self.model.batch_invariant else [[slot] for slot in slots]

    def _denoise(self, slots: list[int]) -> None:
        rows = [self._rows[slot] for slot in slots]
        earlier = [each.self_conditioning for each in rows if each.self_conditioning is not None]
        tokens, arenas = self._packed(slots, [each.canvas[0] for each in rows])
        logits = self.model.denoise(tokens, arenas, torch.cat(earlier, dim=1) if earlier else None)
        # Random numbers for the whole vocabulary are the most memory that a pass needs, so a slot at a time.
        for each, own in zip(rows, logits.split(self.model.config.canvas_length, dim=1), strict=False):
            each.take(own)

    def _packed(self, slots: list[int], pieces: list[torch.Tensor]) -> tuple[torch.Tensor, PackedArenas]:
        """Tokens int64 [n] of each slot in one row [1, N], and what they attend to."""
        arenas, counts = [self._rows[slot].arena for slot in slots], [len(piece) for piece in pieces]
        spare = -sum(counts) % ROW_MULTIPLE if self.model.batch_invariant else 0
        if spare:
            arenas, counts = [*arenas, self._arena(1, spare)], [*counts, spare]
        return F.pad(torch.cat(pieces), (0, spare))[None], PackedArenas(arenas, counts)


class LockstepRunner(_Eager):
    """One batch that begins together. A slot that is done waits until all are; then every row takes its next canvas.

    Rows of requests that are over go on unread, as in transformers, whose draws they are a part of.
    """

    def __init__(self, model: Model, slots: int, seed: int):
        super().__init__(model, slots)
        self.short = self.piece = self.capacity
        self._seed = seed
        self._rows: Rows | None = None
        self._pending: dict[int, list[int]] = {}
        self._finished: set[int] = set()

    def admit(
        self, slot: int, owner: int, rule: Rule, settings: DecodeSettings, seed: int, *, keep: bool, positions: int
    ) -> None:
        self.owners[slot], self._rule, self._settings = owner, rule, settings

    def read(self, pieces: Mapping[int, Sequence[int]]) -> None:
        self._pending.update({slot: list(tokens) for slot, tokens in pieces.items()})

    def start(self, slots: Sequence[int]) -> None:
        pass  # with the rest of the batch

    def run_pass(self, slots: Sequence[int]) -> None:
        rows = self._rows or self._begin()
        running = rows.running()
        if not running:
            self.model.encode(self._committed(rows), rows.arena)
            rows.start()
            running = rows.running()
        rows.run_pass()
        self._statuses += [rows.status(row, row, self.owners[row]) for row in running if row in self.owners]

    def reset(self) -> None:
        super().reset()
        self._rows = None
        self._pending.clear()
        self._finished.clear()

    def _begin(self) -> Rows:
        """Read all prompts, padded on the left, and start the first canvas."""
        config, pending = self.model.config, self._pending
        prompts = [pending[slot] for slot in range(self.slots)]
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        canvases = -(-self._settings.max_new_tokens // config.canvas_length)
        left = torch.tensor(padding, device=self.device)
        arena = self._arena(self.slots, longest + (canvases - 1) * config.canvas_length, left)
        stream = TorchStream(self._seed, self.slots, config.canvas_length, config.vocab_size, self.device)
        rows = self._rows = Rows(self.model, self._rule, self._settings, stream, arena)
        tokens = [[config.pad_token_id] * count + prompt for count, prompt in zip(padding, prompts, strict=True)]
        self.model.encode(torch.tensor(tokens, device=self.device), arena)
        rows.start()
        pending.clear()
        return rows

    def _committed(self, rows: Rows) -> torch.Tensor:
        """What every row commits, int64 [B, C]: requests that are over end with padding after their end token."""
        length, pad = self.model.config.canvas_length, self.model.config.pad_token_id
        taken = []
        for slot, canvas in enumerate(rows.canvases.argmax.view(self.slots, length).tolist()):
            kept = self._pending.pop(slot, None)
            if kept is None:
                kept = [] if slot in self._finished else cut(canvas, self._settings.eos_token_ids, length)[0]
                self._finished.add(slot)
            taken.append(kept + [pad] * (length - len(kept)))
        return torch.tensor(taken, device=self.device)
