"""What tests of several files here need."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Memory is given back by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
