"""What the tests here share: generations compared pass by pass, weights bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from parity import _Drafts
from transformers import DiffusionGemmaForBlockDiffusion

from redraft.network.weights import iter_tensors
from redraft.quant.load import load_checkpoint

from_pretrained = DiffusionGemmaForBlockDiffusion.from_pretrained
Run = tuple[torch.Tensor, list[torch.Tensor]]  # sequences, and the argmax canvas of every pass


def generate(model: Any, ids: torch.Tensor, seed: int, **settings: Any) -> Run:
    streamer = _Drafts()
    torch.manual_seed(seed)
    out = model.generate(ids, streamer=streamer, **settings)
    return out.sequences, streamer.drafts


def same(a: Run, b: Run) -> bool:
    """Every pass must agree, not only the committed tokens."""
    return torch.equal(a[0], b[0]) and len(a[1]) == len(b[1]) and all(map(torch.equal, a[1], b[1]))


def assert_same_bits(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def assert_same_weights(a: Path, b: Path) -> None:
    """Of two directories, as the engine reads them."""
    left, right = (load_checkpoint(path, dtype=torch.float32).weights for path in (a, b))
    assert_same_bits(dict(iter_tensors(left)), dict(iter_tensors(right)))


def assert_saves(model: Any, path: Path, reference: Path) -> None:
    model.save_pretrained(path)
    assert_same_weights(path, reference)


def load(path: Path, **kwargs: Any) -> Any:
    """from_pretrained, which must find every tensor and no other, and leave none of them unset."""
    model, info = from_pretrained(path, output_loading_info=True, **kwargs)
    assert not any(info.values()), info
    for name, tensor in model.state_dict().items():
        assert tensor.device.type != "meta", name
        assert not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()), name
    return model


def hub_snapshot(cache: Path, name: str) -> Path:
    """Where the hub's cache has the files of the repository org/NAME, which is yet to be filled."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / f"models--org--{name}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    return repository / "snapshots" / commit
