"""`redraft generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from redraft.cli import options
from redraft.errors import UsageError


@options.grouped
def command(
    *,
    model: options.Model,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; '-' or nothing reads it from stdin.")
    ] = None,
    system: options.System = None,
    decoding: options.Decoding,
    loading: options.Loading,
    json_output: options.Json = False,
) -> None:
    """Answer one prompt; on a terminal, watch the canvas being rewritten."""
    from redraft.cli.common import answer, describe, on_terminal, print_figures, print_json

    settings = decoding.settings()
    text = read_prompt(prompt)
    engine = loading.engine(model)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    result = answer(engine, messages, decoding.seed, settings, quiet=json_output)
    if json_output:
        print_json({**result.to_dict(), **describe(engine, model)})
    elif on_terminal():
        print_figures(result, engine)


def read_prompt(prompt: str | None) -> str:
    """The prompt given, or all of stdin for '-' or nothing, without the newline that `echo` adds."""
    if prompt is not None and prompt != "-":
        return check_text(prompt)
    if prompt is None and sys.stdin.isatty():
        raise UsageError("no prompt: give it as an argument, or '-' to type it and end with Ctrl-D")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as e:
        raise UsageError(f"the prompt on stdin is not text in {e.encoding} (byte {e.start})") from None


def check_text(prompt: str) -> str:
    """The prompt, unless the shell passed bytes that are no text. Raises UsageError."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UsageError("the prompt is not valid Unicode text") from None
    return prompt
