"""`redraft chat`: a conversation, turn by turn."""

import sys
from contextlib import suppress

from redraft.cli import options
from redraft.cli.common import answer, print_facts
from redraft.config import check_seed
from redraft.errors import RedraftError, UsageError

HELP = "/reset forgets the conversation, /seed N changes the seed, /exit or Ctrl-D ends; Ctrl-C stops an answer"


@options.grouped
def command(
    *, model: options.Model, system: options.System = None, decoding: options.Decoding, loading: options.Loading,
    json_output: options.Json = False,
) -> int:  # fmt: skip
    """Talk with a model; it remembers the turns before. Lines of a piped stdin are turns. /help lists commands."""
    return Chat(model, system, decoding, loading, json_output).run()


class Chat:
    """The conversation and its commands. A turn that fails is taken back, and the chat goes on."""

    def __init__(
        self, model: str, system: str | None, decoding: options.Decoding, loading: options.Loading, json_output: bool
    ) -> None:
        self.model, self.json_output = model, json_output
        self.seed, self.settings = decoding.seed, decoding.settings()
        self.engine = loading.engine(model)
        self.opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.opening)
        self.exit_code = 0

    def run(self) -> int:
        """Read turns until /exit or the end of input. On a pipe, the exit code is that of the last error."""
        interactive = sys.stdin.isatty()
        if interactive:
            with suppress(ImportError):  # arrow keys and history, where Python was built with readline
                import readline  # noqa: F401
            print(HELP, file=sys.stderr)
        while True:
            try:
                line = self._read(interactive)
                if line in ("/exit", "/quit"):
                    return 0 if interactive else self.exit_code
                self._handle(line)
            except RedraftError as e:
                print(f"redraft: error: {e}", file=sys.stderr)
                self.exit_code = e.exit_code

    def _read(self, interactive: bool) -> str:
        """The next line, or /exit at the end of input. Raises UsageError."""
        try:
            return input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print(file=sys.stderr)
            return "/exit"
        except UnicodeDecodeError:
            raise UsageError("that line is not text in the terminal's encoding") from None
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(/exit or Ctrl-D ends the chat)", file=sys.stderr)
            return ""

    def _handle(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/help":
            print(HELP, file=sys.stderr)
        elif name == "/reset":
            self.messages = list(self.opening)
        elif name == "/seed":
            self.seed = check_seed(int(rest) if rest.strip().isdecimal() else rest)
        elif name.startswith("/"):
            raise UsageError(f"unknown command {name}; {HELP}")
        elif line:
            self._turn(line)

    def _turn(self, text: str) -> None:
        turn = {"role": "user", "content": text}
        try:
            result = answer(self.engine, [*self.messages, turn], self.seed, self.settings, quiet=self.json_output)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            print("(stopped; this turn is forgotten)", file=sys.stderr)
            return
        except UsageError as e:
            if self.messages == self.opening:
                raise
            raise UsageError(f"{e}; or /reset forgets the turns before") from None
        self.messages += [turn, {"role": "assistant", "content": result.text}]
        print_facts(result, self.engine, self.model, self.json_output)
