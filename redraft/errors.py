"""Errors that reach the user: one line that says what, where and what to do next.

The command line prints the message alone and exits with `exit_code`; `--debug` shows the traceback.
"""


class RedraftError(Exception):
    """Something failed that the user can act on. Exit code 1."""

    exit_code = 1


class UsageError(RedraftError):
    """An argument, a setting or a prompt that cannot be used as given. Exit code 2."""

    exit_code = 2


class CheckpointError(RedraftError):
    """A checkpoint that is missing, damaged or of an unknown kind; names the file and the tensor. Exit code 1."""


class MemoryShortage(RedraftError):
    """Requests that need more memory than the device has free; raised before any of it is taken. Exit code 1."""
