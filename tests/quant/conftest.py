"""The command line's fixture, here too."""

from cli.conftest import run  # noqa: F401
