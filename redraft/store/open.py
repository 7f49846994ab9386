"""What a MODEL argument names: a directory, a hub id, "demo" (the bundled model), or random weights (`random:NAME`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from redraft.errors import CheckpointError
from redraft.store.random import is_random, named, random_files, random_tokenizer
from redraft.store.read import CheckpointFiles, open_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEMO = Path(__file__).parents[1] / "demo" / "checkpoint"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def open_model(model: str | Path, verify: bool = False) -> CheckpointFiles:
    """Configuration, shapes and sizes of any MODEL argument; no weights are read. Random ones have no tensors to read.

    verify: also compare stored tensors with the hashes of manifest.json. Raises UsageError for an unknown random
    model, CheckpointError for everything else.
    """
    return random_files(model) if is_random(model) else open_checkpoint(find_checkpoint(model), verify)


def find_checkpoint(model: str | Path) -> Path:
    """The local directory of a model: a directory, "demo" (the bundled model), or a hub id, downloaded when needed.

    Raises CheckpointError when it is none of these or cannot be downloaded.
    """
    if model == "demo":
        if not DEMO.is_dir():
            missing = "the bundled checkpoint is missing from this installation"
            raise CheckpointError(f"{DEMO}: {missing}; reinstall Redraft")
        return DEMO
    if is_random(model):
        raise CheckpointError(f"{model}: random weights live in memory and have no files; give a stored checkpoint")
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path}: is a file, expected a checkpoint directory; name the directory that holds it")
    if isinstance(model, str) and _HUB_ID.fullmatch(model) and not model.startswith("."):
        return _download(model)
    known = "a checkpoint directory, a hub id such as org/name, or demo"
    raise CheckpointError(f"{model}: no such directory; give {known}")


def published_label(model: str | Path, path: Path) -> str:
    """What written files call the model found at `path`: a hub id or the directory's name, no path of this machine."""
    return path.resolve().name if Path(model).expanduser().is_dir() else str(model)


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES)))
    except Exception as e:  # the hub client raises its own, httpx's and plain OS errors
        reason = next((line for line in str(e).splitlines() if line.strip()), "no reason given").strip()
        raise CheckpointError(
            f"{hub_id}: no such directory here, and the hub download failed ({type(e).__name__}: {reason}); check the "
            "name, the network and your access rights, or download it elsewhere and give the directory"
        ) from e


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer and chat template of an opened model's `path`, made on the spot for random weights.

    Raises CheckpointError; never runs code from the directory.
    """
    from transformers import AutoTokenizer

    if is_random(path):
        return random_tokenizer(named(path)[0])
    if not (path / "tokenizer.json").is_file() and not (path / "tokenizer.model").is_file():
        file = path / "tokenizer.json"
        raise CheckpointError(f"{file}: file is missing; copy the tokenizer files of the original here")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as e:  # the tokenizers library raises bare Exceptions
        raise CheckpointError(f"{path}: the tokenizer cannot be loaded ({e})") from e
    return tokenizer
