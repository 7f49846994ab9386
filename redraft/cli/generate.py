"""`redraft generate`: one prompt, one answer."""

import sys
from typing import Annotated

import typer

from redraft.cli import options
from redraft.cli.common import answer, print_facts
from redraft.errors import UsageError

Prompt = Annotated[str | None, typer.Argument(metavar="PROMPT", help="The prompt; '-' or nothing reads it from stdin.")]


@options.grouped
def command(
    *, model: options.Model, prompt: Prompt = None, system: options.System = None, decoding: options.Decoding,
    loading: options.Loading, json_output: options.Json = False,
) -> None:  # fmt: skip
    """Answer one prompt; on a terminal, watch the canvas being rewritten."""
    settings = decoding.settings()
    text = read_prompt(prompt)
    engine = loading.engine(model)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    result = answer(engine, messages, decoding.seed, settings, quiet=json_output)
    print_facts(result, engine, model, json_output)


def read_prompt(prompt: str | None) -> str:
    """The prompt given, or all of stdin for '-' or nothing, without the newline that `echo` adds. Raises UsageError."""
    if prompt is None and sys.stdin.isatty():
        raise UsageError("no prompt: give it as an argument, or '-' to type it and end with Ctrl-D")
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt is None or prompt == "-" else prompt
        text.encode()  # the shell may pass bytes that are no text
    except UnicodeDecodeError as e:
        raise UsageError(f"the prompt on stdin is not text in {e.encoding} (byte {e.start})") from None
    except UnicodeEncodeError:
        raise UsageError("the prompt is not valid Unicode text") from None
    return text
