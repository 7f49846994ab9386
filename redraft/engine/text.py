"""Text in, text out: a prompt to token ids, an answer's token ids to text as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from redraft.engine.events import Committed, Event, Result
from redraft.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[dict[str, str]] | Sequence[int]


class Text:
    """The tokenizer and chat template of a checkpoint whose vocabulary has `vocab_size` ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int):
        self.tokenizer, self.vocab_size = tokenizer, vocab_size

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, and what is refused: see Engine.encode_prompt."""
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UsageError("the prompt is empty")
            prompt = [{"role": "user", "content": prompt}]
        if not prompt:
            raise UsageError("the prompt is empty")
        if isinstance(prompt[0], dict):
            return self._apply_template([dict(m) for m in prompt])  # type: ignore[arg-type]
        return self._check_ids(prompt)  # type: ignore[arg-type]

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
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                raise UsageError(
                    f"token id {token!r} at position {position} is outside the vocabulary (0 to {self.vocab_size - 1})"
                )
        return list(ids)


class Speech:
    """The text of one answer, canvas by canvas."""

    def __init__(self, text: Text):
        self._text = text
        self._tokens: list[int] = []
        self._said = ""

    def add(self, event: Event) -> Event:
        """The event with its text."""
        if isinstance(event, Result):
            return replace(event, text=self._text.decode(event.token_ids))
        if not isinstance(event, Committed):
            return event
        self._tokens += event.tokens
        text = self._text.decode(self._tokens)
        if event.finish_reason is None:
            text = text.rstrip("\ufffd")  # an unfinished character waits for the next canvas
        new, self._said = text[len(self._said) :], text
        return replace(event, text=new)
