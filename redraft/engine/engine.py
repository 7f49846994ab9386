"""The engine: a loaded model, prompts in, events out (a draft per pass, committed text per canvas, then the result)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from redraft.config import TIERS, DecodeSettings, ModelConfig, QuantSpec, Tier, WeightFormat, check_choice, check_seed
from redraft.decode.rule import DEFAULT_RULE, find_rule
from redraft.engine.eager import EagerRunner, LockstepRunner
from redraft.engine.events import Event, Result
from redraft.engine.graphs import GraphRunner
from redraft.engine.loop import Loop, Request
from redraft.engine.text import Prompt, Text
from redraft.engine.tickets import Desk, Ticket
from redraft.errors import MemoryShortage, UsageError
from redraft.kernels.launch import HAS_TRITON
from redraft.network.arena import check_context
from redraft.network.fused import FusedModel
from redraft.network.model import Model
from redraft.network.weights import nbytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from redraft.store.read import Checkpoint

FUSED_SLOTS, EAGER_SLOTS = 32, 8  # at most, where nothing else is asked for; further requests wait in line


class Engine:
    """A loaded model ready to answer, for callers in any number of threads. Create it with `redraft.load`.

    slots, context: requests that run side by side and positions of each, prompt and answer. Where they are given the
    memory is taken and all passes are captured now; else with the first requests, and anew when more are asked for.
    """

    def __init__(
        self, checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase, tier: Tier, slots: int | None = None,
        context: int | None = None,
    ):  # fmt: skip
        check_choice("tier", tier, TIERS)
        self.config: ModelConfig = checkpoint.config
        self.settings: DecodeSettings = checkpoint.settings
        self.notes: list[str] = checkpoint.notes
        self.weight_bytes = nbytes(checkpoint.weights)
        self.fused = self._fuse(checkpoint)  # before Model: projections become views of joined ones
        self.model = Model(checkpoint.config, checkpoint.weights)
        self.tier: Tier = tier
        self.weights: WeightFormat = "bf16" if checkpoint.spec is None else "w4"
        self.tokenizer = tokenizer
        self._text = Text(tokenizer, self.config.vocab_size)
        self._desk = open_desk(self.model, self.fused, self._text, slots, context)
        if tier == "turbo" and (slots is not None or context is not None):
            self._desk.open(slots or 1, context or 1)

    def _fuse(self, checkpoint: Checkpoint) -> FusedModel | None:
        """Fused passes need a GPU, BF16 and shapes that the kernels cover; else turbo runs on torch's operations."""
        embed = checkpoint.weights.embed
        if not embed.is_cuda or embed.dtype != torch.bfloat16:
            return None
        missing = missing_kernels(checkpoint.config, checkpoint.spec)
        if missing:
            self.notes = [*self.notes, f"{missing}: all tiers run on torch's operations"]
            return None
        return FusedModel(checkpoint.config, checkpoint.weights, checkpoint.spec)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._text.decode(token_ids)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: a string as one user turn, messages through the chat template, token ids as they are.

        Raises UsageError when it is empty or holds an id outside the vocabulary.
        """
        return self._text.encode(prompt)

    def submit(
        self, prompt: Prompt, *, seed: int = 0, tier: Tier | None = None, rule: str = DEFAULT_RULE, drafts: bool = True,
        **settings: Any,
    ) -> Ticket:  # fmt: skip
        """Put a prompt in line; it joins the passes as soon as a slot is free. Settings are as in `generate`.

        Iterate over the ticket for events (a Draft per pass only with `drafts`), or call its `result()` or `cancel()`.
        """
        return self._submit([prompt], seed, tier, rule, settings, drafts)[0]

    def generate(
        self, prompt: Prompt, *, seed: int = 0, tier: Tier | None = None, rule: str = DEFAULT_RULE, **settings: Any
    ) -> Result:
        """Answer one prompt. Settings are the fields of the rule's settings; unset ones come from the checkpoint."""
        return self._submit([prompt], seed, tier, rule, settings, drafts=False)[0].result()

    def generate_batch(
        self, prompts: Sequence[Prompt], *, seed: int | Sequence[int] = 0, tier: Tier | None = None,
        rule: str = DEFAULT_RULE, **settings: Any,
    ) -> list[Result]:  # fmt: skip
        """Answer several prompts side by side.

        Tier turbo gives prompt i the seed `seed + i` (or seed[i]) and a text that does not depend on the others. Tiers
        off and bitexact pad the batch on the left and draw all of it from one torch generator, as transformers does.
        """
        if not isinstance(prompts, list | tuple):
            raise UsageError(f"expected a list of prompts, found {type(prompts).__name__}")
        if not prompts:
            raise UsageError("no prompts were given")
        return [ticket.result() for ticket in self._submit(prompts, seed, tier, rule, settings, drafts=False)]

    def stream(
        self, prompt: Prompt, *, seed: int = 0, tier: Tier | None = None, rule: str = DEFAULT_RULE, **settings: Any
    ) -> Iterator[Event]:
        """Answer one prompt, yielding a Draft per pass, a Committed per canvas, and last the Result."""
        return _until_left(self._submit([prompt], seed, tier, rule, settings, drafts=True)[0])

    def close(self) -> None:
        """End what is running and give back all memory but the weights'; a later request takes it anew."""
        self._desk.close()

    def _submit(
        self, prompts: Sequence[Prompt], seed: int | Sequence[int], tier: Tier | None, rule: str,
        changes: dict[str, Any], drafts: bool,
    ) -> list[Ticket]:  # fmt: skip
        tier = self.tier if tier is None else tier
        check_choice("tier", tier, TIERS)
        settings = self.settings.replace(**changes)
        seeds = self._seeds(seed, len(prompts), tier)
        requests = [
            Request(self.encode_prompt(prompt), find_rule(rule), settings, own, drafts)
            for prompt, own in zip(prompts, seeds, strict=True)
        ]
        canvases = -(-settings.max_new_tokens // self.config.canvas_length)
        # A canvas occupies its whole length even when max_new_tokens cuts it.
        longest = max(len(request.prompt) for request in requests)
        check_context(self.config, longest, canvases * self.config.canvas_length)
        return (self._desk if tier == "turbo" else self._lockstep(tier, seeds)).submit(requests)

    def _lockstep(self, tier: Tier, seeds: list[int]) -> Desk:
        """A desk for one batch of the tiers whose random numbers are the whole batch's."""
        if len(set(seeds)) > 1:
            raise UsageError(f"tier {tier} draws a whole batch from one seed; pass one seed or use tier turbo")

        model = self.model

        def open_loop(slots: int, positions: int) -> Loop:
            return Loop(LockstepRunner(model, slots, seeds[0]), model.config)

        longest = self.config.max_position_embeddings
        return Desk(open_loop, len(seeds), longest, self._text, self.config.canvas_length)

    def _seeds(self, seed: int | Sequence[int], count: int, tier: Tier) -> list[int]:
        seed = seed.tolist() if hasattr(seed, "tolist") else seed  # numpy's integers and arrays
        if not isinstance(seed, list | tuple):
            seed = check_seed(seed)
            return [check_seed(seed + i if tier == "turbo" else seed) for i in range(count)]
        if len(seed) != count:
            raise UsageError(f"{len(seed)} seeds were given for {count} prompts")
        return [check_seed(s) for s in seed]

    def open_loop(self, slots: int, positions: int) -> Loop:
        """A loop of its own in tier turbo, on fused passes where the device allows.

        It has `slots` slots of `positions` positions, or fewer where memory ends. Raises MemoryShortage if not even one
        fits.
        """
        return _open_loop(self.model, self.fused, slots, positions)


def _until_left(ticket: Ticket) -> Iterator[Event]:
    """The events of a request, which is cancelled when its reader leaves."""
    try:
        yield from ticket
    finally:
        ticket.cancel()


def missing_kernels(config: ModelConfig, spec: QuantSpec | None) -> str | None:
    """Why there are no fused passes of a network in BF16 on a GPU, or None."""
    if not FusedModel.supports(config, spec):
        return "the GPU kernels do not cover these shapes"
    return None if HAS_TRITON else "Triton is not installed"


def open_desk(
    model: Model, fused: FusedModel | None, text: Text | None, slots: int | None = None, context: int | None = None
) -> Desk:
    """A desk for requests in tier turbo, on fused passes where there are any. slots, context: as in `Engine`."""
    # A slot of an eager runner takes memory when it is first used; one of fused passes when they are captured.
    most = slots or (FUSED_SLOTS if fused else EAGER_SLOTS)
    least = slots or (1 if fused else EAGER_SLOTS)
    # No method of an engine, which would be in a cycle with its desk and outlive its last user.
    later = slots is None and context is None
    open_loop = partial(_open_loop, model, fused, least=(least, context or 1), later=later)
    return Desk(open_loop, most, context or model.config.max_position_embeddings, text, model.config.canvas_length)


def _open_loop(
    model: Model, fused: FusedModel | None, slots: int, positions: int, *, least: tuple[int, int] = (1, 1),
    later: bool = False,
) -> Loop:  # fmt: skip
    slots, positions = max(slots, least[0]), max(positions, least[1])
    if fused is None:
        return Loop(EagerRunner(model, slots), model.config)
    # Rounded up, so that a slightly longer prompt does not plan anew.
    capacity = -(-positions // 1024) * 1024
    while True:
        try:
            return Loop(GraphRunner(fused, slots, capacity, later=later), model.config)
        except MemoryShortage:
            if slots == 1:
                raise
            slots //= 2
