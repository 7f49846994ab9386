"""The engine: a loaded model, prompts in, events out (a draft per pass, committed text per canvas, then the result)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from redraft.config import TIERS, DecodeSettings, ModelConfig, Tier, WeightFormat, check_choice, check_seed
from redraft.decode.streams import CounterStream, Stream, TorchStream
from redraft.engine.batch import Batch, ReferenceBatch, Request, SlotBatch
from redraft.engine.events import Event, Result
from redraft.engine.graphs import SlotRunner
from redraft.errors import UsageError
from redraft.kernels.launch import HAS_TRITON
from redraft.network.arena import check_context
from redraft.network.fused import FusedModel
from redraft.network.model import Model
from redraft.network.weights import nbytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from redraft.store.read import Checkpoint

Prompt = str | Sequence[dict[str, str]] | Sequence[int]


class Engine:
    """A loaded model ready to answer. Create it with `redraft.load`."""

    def __init__(self, checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase, tier: Tier):
        check_choice("tier", tier, TIERS)
        self.config: ModelConfig = checkpoint.config
        self.settings: DecodeSettings = checkpoint.settings
        self.notes: list[str] = checkpoint.notes
        self.weight_bytes = nbytes(checkpoint.weights)
        self.fused = self._fuse(checkpoint)
        self.model = Model(checkpoint.config, checkpoint.weights)
        self._runner: SlotRunner | None = None
        self.tokenizer = tokenizer
        self.tier: Tier = tier
        self.weights: WeightFormat = "bf16" if checkpoint.spec is None else "w4"

    def _fuse(self, checkpoint: Checkpoint) -> FusedModel | None:
        """Fused passes need a GPU, BF16 and shapes that the kernels cover; else turbo runs on torch's operations."""
        embed = checkpoint.weights.embed
        if not embed.is_cuda or embed.dtype != torch.bfloat16:
            return None
        missing = "Triton is not installed" if not HAS_TRITON else None
        if not FusedModel.supports(checkpoint.config, checkpoint.spec):
            missing = "the GPU kernels do not cover these shapes"
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
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: a string as one user turn, messages through the chat template, token ids as they are.

        Raises UsageError when it is empty or holds an id outside the vocabulary.
        """
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UsageError("the prompt is empty")
            prompt = [{"role": "user", "content": prompt}]
        if not prompt:
            raise UsageError("the prompt is empty")
        if isinstance(prompt[0], dict):
            return self._apply_template([dict(m) for m in prompt])  # type: ignore[arg-type]
        return self._check_ids(prompt)  # type: ignore[arg-type]

    def generate(self, prompt: Prompt, *, seed: int = 0, tier: Tier | None = None, **settings: Any) -> Result:
        """Answer one prompt. Settings are the fields of DecodeSettings; unset ones come from the checkpoint."""
        return self.generate_batch([prompt], seed=seed, tier=tier, **settings)[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], *, seed: int | Sequence[int] = 0, tier: Tier | None = None, **settings: Any
    ) -> list[Result]:
        """Answer several prompts in one batch, left-padded to equal length.

        Tier turbo gives prompt i the seed `seed + i` (or seed[i]) and a text that does not depend on the others. Tiers
        off and bitexact draw the whole batch from one torch generator, as transformers does.
        """
        if not prompts:
            raise UsageError("no prompts were given")
        results: list[Result | None] = [None] * len(prompts)
        for row, event in self._run(prompts, seed, tier, settings, drafts=False):
            if isinstance(event, Result):
                results[row] = event
        return [r for r in results if r is not None]

    def stream(self, prompt: Prompt, *, seed: int = 0, tier: Tier | None = None, **settings: Any) -> Iterator[Event]:
        """Answer one prompt, yielding a Draft per pass, a Committed per canvas, and last the Result."""
        for _, event in self._run([prompt], seed, tier, settings, drafts=True):
            yield event

    def _apply_template(self, messages: list[dict[str, str]]) -> list[int]:
        for message in messages:
            if set(message) < {"role", "content"} or not isinstance(message.get("content"), str):
                raise UsageError(f"a message needs the text fields role and content, found {sorted(message)}")
        if not any(m["content"].strip() for m in messages):
            raise UsageError("the prompt is empty")
        if self.tokenizer.chat_template is None:
            raise UsageError("this checkpoint has no chat template; pass token ids instead of text")
        encoded: Any = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return self._check_ids(encoded["input_ids"])

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        for position, token in enumerate(ids):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.config.vocab_size:
                raise UsageError(
                    f"token id {token!r} at position {position} is outside the vocabulary (0 to "
                    f"{self.config.vocab_size - 1})"
                )
        return list(ids)

    def _stream_for(self, tier: Tier, seeds: list[int]) -> Stream:
        length, vocab = self.config.canvas_length, self.config.vocab_size
        if tier == "turbo":
            return CounterStream(seeds, length, vocab, self.device)
        if len(set(seeds)) > 1:
            raise UsageError(f"tier {tier} draws a whole batch from one seed; pass one seed or use tier turbo")
        return TorchStream(seeds[0], len(seeds), length, vocab, self.device)

    def _seeds(self, seed: int | Sequence[int], count: int, tier: Tier) -> list[int]:
        if isinstance(seed, int):
            return [check_seed(seed + i if tier == "turbo" else seed) for i in range(count)]
        if len(seed) != count:
            raise UsageError(f"{len(seed)} seeds were given for {count} prompts")
        return [check_seed(s) for s in seed]

    def _run(
        self,
        prompts: Sequence[Prompt],
        seed: int | Sequence[int],
        tier: Tier | None,
        changes: dict[str, Any],
        drafts: bool,
    ) -> Iterator[tuple[int, Event]]:
        tier = tier or self.tier
        check_choice("tier", tier, TIERS)
        settings = self.settings.replace(**changes)
        seeds = self._seeds(seed, len(prompts), tier)
        requests = [Request(self.encode_prompt(p), s) for p, s in zip(prompts, seeds, strict=True)]
        yield from self._open(requests, settings, tier, seeds).run(self.device, drafts)

    def _open(self, requests: list[Request], settings: DecodeSettings, tier: Tier, seeds: list[int]) -> Batch:
        """The batch, on fused passes where the tier and the device allow them."""
        canvases = -(-settings.max_new_tokens // self.config.canvas_length)
        longest = max(len(r.prompt) for r in requests)
        # A canvas occupies its whole length even when max_new_tokens cuts it.
        check_context(self.config, longest, canvases * self.config.canvas_length)
        if tier == "turbo" and self.fused is not None:
            capacity = longest + (canvases - 1) * self.config.canvas_length
            return SlotBatch(self.runner(len(requests), capacity), self.decode, requests, settings)
        return ReferenceBatch(self.model, self._stream_for(tier, seeds), self.decode, requests, settings)

    def runner(self, count: int, capacity: int) -> SlotRunner:
        """The runner of earlier calls where it is as wide and long enough, else a new one."""
        assert self.fused is not None, "fused passes are available"
        runner = self._runner
        if runner is None or runner.slots != count or runner.capacity < capacity:
            self._runner = None  # its memory is free before the next plan is made
            # Rounded up, so that a slightly longer prompt does not plan anew.
            runner = self._runner = SlotRunner(self.fused, count, -(-capacity // 1024) * 1024)
        return runner
