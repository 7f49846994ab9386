"""The command `redraft`: one module per subcommand, imported when it is asked for, and one place for errors.

A subcommand is a module here with a function `command`, or with a typer group `app`; docstrings are the help texts.
Modules import torch and the engine inside functions, so that `--help` and a mistyped option answer at once.
"""

import errno
import importlib
import io
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import redraft
from redraft.errors import RedraftError

# Settings of libraries that read the environment when they are first imported; what the user has set stays.
# OpenMP threads that spin while they wait make a 0.3 s answer take 17 s once another program shares two cores.
LIBRARY_SETTINGS = {"OMP_WAIT_POLICY": "passive", "TRANSFORMERS_VERBOSITY": "error"}

COMMANDS = (
    "demo", "generate", "chat", "quantize", "export", "merge-lora", "inspect", "eval", "ab", "probe", "bench",
    "compare-ar", "profile", "tune",
)  # fmt: skip

# typer keeps the base class of its usage errors private (and moved it between releases); BadParameter is public.
_TyperUsageError: Any = typer.BadParameter.__mro__[1]


class HelpfulGroup(TyperGroup):
    """A command of subcommands; alone it prints its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])


class _LazyGroup(HelpfulGroup):
    """The group `redraft`: knows its subcommands by name and imports a module only when it is used."""

    commands: Any

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands = dict.fromkeys(COMMANDS)  # names alone, for help and for suggestions after a typing error

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"redraft.cli.{cmd_name.replace('-', '_')}")
        if hasattr(module, "app"):
            return typer.main.get_group(module.app)
        app = typer.Typer(add_completion=False)
        app.command(cmd_name)(module.command)
        return typer.main.get_command(app)


def _print_version(value: bool) -> None:
    if value:
        print(f"redraft {redraft.__version__}")
        raise typer.Exit()


app = typer.Typer(cls=_LazyGroup, add_completion=False)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors. Accepted anywhere.")] = False,
) -> None:
    """DiffusionGemma, a language model that rewrites a canvas of tokens, with 4-bit experts."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 1 failure, 2 usage, 130 interrupted."""
    for name, value in LIBRARY_SETTINGS.items():
        os.environ.setdefault(name, value)
    debug, args = _take_debug(sys.argv[1:] if argv is None else argv)
    _tolerate_unencodable_output()
    try:
        return _run(args)
    except (Exception, KeyboardInterrupt) as e:
        _drop_unwritable_output()
        if isinstance(e, BrokenPipeError):
            return 1
        if debug:
            traceback.print_exc()
        message, code = _explain(e)
        print(f"redraft: error: {message}", file=sys.stderr)
        return code


def _run(args: list[str]) -> int:
    """What typer's own `main` does, without its handling of errors, Ctrl-C and closed pipes."""
    group = typer.main.get_command(app)
    try:
        with group.make_context("redraft", args) as ctx:
            code = group.invoke(ctx)
    except typer.Exit as e:
        code = e.exit_code
    sys.stdout.flush()  # here, so that a full disk or a closed pipe behind stdout is reported and not lost
    return code or 0


def _explain(e: BaseException) -> tuple[str, int]:
    """One line and the exit code for an exception."""
    if isinstance(e, KeyboardInterrupt):
        return "interrupted", 130  # 128 + SIGINT
    if isinstance(e, RedraftError):
        return _one_line(str(e)), e.exit_code
    if isinstance(e, _TyperUsageError):
        path = e.ctx.command_path if e.ctx else "redraft"
        return f"{_one_line(e.format_message()).rstrip('.')} (see '{path} --help')", 2
    if isinstance(e, OSError) and e.errno:
        where = f"{os.fsdecode(e.filename)}: " if isinstance(e.filename, str | bytes | os.PathLike) else ""
        advice = {
            errno.ENOSPC: "; free some space and run it again",
            errno.EACCES: "; check the permissions or choose another place",
        }.get(e.errno, "")
        return f"{where}{os.strerror(e.errno)}{advice}", 1
    return f"internal error: {_one_line(f'{type(e).__name__}: {e}')} (run again with --debug for the traceback)", 1


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _take_debug(argv: list[str]) -> tuple[bool, list[str]]:
    """Whether `--debug` is there, before or after the subcommand, and the arguments without it."""
    end = argv.index("--") if "--" in argv else len(argv)
    options = [arg for arg in argv[:end] if arg != "--debug"]
    return len(options) < end, options + argv[end:]


def _tolerate_unencodable_output() -> None:
    """A model may write any character; a terminal of another encoding shows '?' rather than stopping the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_unwritable_output() -> None:
    """Where stdout is a closed pipe or a full disk, let go of what it holds: Python would complain again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
