"""Shared fixtures: tiny checkpoints on disk, built once."""

import os
import sys
from pathlib import Path

# Before torch: threads that spin while they wait starve each other when the machine has other work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

# Before triton: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

sys.path.insert(0, str(Path(__file__).parent))

# Workers of pytest-xdist share the cores.
torch.set_num_threads(1 if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1 else 2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One where there is a GPU, whose memory the tests of the real shapes take one after the other."""
    return 1 if torch.cuda.is_available() else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "gpu" in item.keywords and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(scope="session")
def tiny_hf():
    """transformers' model, fp32."""
    from tiny import tiny_model

    return tiny_model()


@pytest.fixture(scope="session")
def tiny_dir(tiny_hf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model saved by transformers in fp32, with a character tokenizer."""
    from tiny import tiny_tokenizer

    path = tmp_path_factory.mktemp("tiny")
    tiny_hf.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def packed_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint packed in groups of 16 and 8."""
    import redraft

    path = tmp_path_factory.mktemp("packed") / "w4"
    redraft.quantize(tiny_dir, path, redraft.QuantSpec(16, 8))
    return path
