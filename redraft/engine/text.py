"""Text in, text out: a prompt to token ids, an answer's token ids to text as they come."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from redraft.config import is_whole
from redraft.engine.events import Committed, Event, Result
from redraft.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[dict[str, str]] | Sequence[int]
ROLES = ("system", "developer", "user", "assistant", "model", "tool")
PRIVATE, PRIVATE_END = 0xF0000, 0xFFFFE  # Unicode's supplementary private use area


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
            prompt = [{"role": "user", "content": prompt}]
        if hasattr(prompt, "tolist"):  # numpy's and torch's arrays
            prompt = prompt.tolist()
        if not isinstance(prompt, list | tuple):
            raise UsageError(f"a prompt is text, a list of messages or token ids, found {type(prompt).__name__}")
        if not prompt:
            raise UsageError("the prompt is empty")
        if any(isinstance(part, Mapping) for part in prompt):
            return self._apply_template([_message(number, part) for number, part in enumerate(prompt)])
        return self._check_ids(prompt)

    def _apply_template(self, messages: list[dict[str, str]]) -> list[int]:
        if not any(m["content"].strip() for m in messages):
            raise UsageError("the prompt is empty")
        if messages[-1]["role"] in ("assistant", "model"):
            raise UsageError("the last message is an answer already; end with what the model is to answer")
        if self.tokenizer.chat_template is None:
            raise UsageError("this checkpoint has no chat template; pass token ids instead of text")
        # A mark stands for each control marker that was typed, so that only the template writes markers.
        controls = sorted(self._controls(), key=len, reverse=True)
        marks = dict(zip(controls, _unused(messages, len(controls)), strict=True))
        try:
            text = str(self.tokenizer.apply_chat_template(
                [{**message, "content": _replaced(message["content"], marks)} for message in messages],
                tokenize=False, add_generation_prompt=True,
            ))  # fmt: skip
        except Exception as e:  # a template is a program of the checkpoint, and may raise anything
            raise UsageError(f"the chat template does not take these messages: {str(e) or type(e).__name__}") from None
        # Cut after its first character, a marker is ordinary text.
        cut = _replaced(text, {mark: f"{control[:1]}{mark}{control[1:]}" for control, mark in marks.items()})
        parts = re.split(_any_of(marks.values()), cut) if marks else [cut]
        return self._check_ids([token for part in parts for token in self._tokenize(part)])

    def _controls(self) -> list[str]:
        """Markers of which only a template may make tokens: special ones, and what the template writes.

        Others that were added to a vocabulary, as blank lines and tags in Gemma's, are ordinary text.
        """
        template, added = str(self.tokenizer.chat_template), self.tokenizer.added_tokens_decoder.values()
        return [t.content for t in added if t.special or (t.content.strip() and t.content in template)]

    def _tokenize(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return ids

    def _check_ids(self, ids: Sequence[Any]) -> list[int]:
        for position, token in enumerate(ids):
            if not is_whole(token) or not 0 <= token < self.vocab_size:
                raise UsageError(
                    f"token id {token!r} at position {position} is outside the vocabulary (0 to {self.vocab_size - 1})"
                )
        return [int(token) for token in ids]


def _message(number: int, message: Any) -> dict[str, str]:
    """A copy of a message with a known role and a text. Raises UsageError naming the message and the field."""
    if not isinstance(message, Mapping):
        raise UsageError(f"message {number}: expected an object with role and content, found {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise UsageError(f"message {number}: role is {role!r}, expected one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise UsageError(f"message {number}: content is {type(content).__name__}, expected text")
    try:
        content.encode()
    except UnicodeEncodeError as e:
        raise UsageError(f"message {number}: content has half a character at position {e.start}") from None
    return {"role": role, "content": content}


def _any_of(words: Iterable[str]) -> str:
    """A pattern of any of these words, the first that fits."""
    return "|".join(map(re.escape, words))


def _replaced(text: str, by: dict[str, str]) -> str:
    """The text with every key of `by` replaced by its value, in one go."""
    return re.sub(_any_of(by), lambda found: by[found[0]], text) if by else text


def _unused(messages: list[dict[str, str]], count: int) -> list[str]:
    """`count` consecutive characters for private use that no message has."""
    taken = sorted({ord(c) for m in messages for c in m["content"] if ord(c) >= PRIVATE} | {PRIVATE - 1, PRIVATE_END})
    for before, after in pairwise(taken):
        if after - before > count:
            return [chr(before + 1 + i) for i in range(count)]
    raise UsageError("the prompt uses too many characters for private use")


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
