"""Writing packed checkpoints: what is in them, and what is left behind by everything that can go wrong."""

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import contents, flip, rewrite, stored

import redraft.quant.quantize as module
import redraft.store.write as writing
from redraft.config import QuantSpec
from redraft.errors import CheckpointError, UsageError
from redraft.kernels.packing import dequantize
from redraft.network.weights import iter_tensors
from redraft.quant.load import load_checkpoint
from redraft.quant.quantize import quantize
from redraft.quant.rtn import quantize_experts
from redraft.store.names import PACKED_NAMES
from redraft.store.read import open_checkpoint
from redraft.store.workdir import partial_path

SPEC, COARSER = QuantSpec(16, 8), QuantSpec(32, 16)
KEPT, INDEX = "model-00001-of-00001.safetensors", "model.safetensors.index.json"
FILES = [*(f"experts_00{i}.safetensors" for i in range(3)), KEPT, "needs_redraft.safetensors"]


class Stop(Exception):
    """Stands for whatever ends the process."""


def stop_after(count: int, error: type[BaseException] = Stop) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done == count:
            raise error

    return progress


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "w4"


@pytest.fixture
def pack(tiny_dir: Path, target: Path) -> Callable[..., Any]:
    """Quantise the tiny checkpoint to `target`; with no arguments to the same as `packed_dir`."""

    def call(source: Path = tiny_dir, spec: QuantSpec = SPEC, **options: Any) -> Any:
        return quantize(source, target, spec, **options)

    return call


@pytest.fixture
def source(tiny_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint to change."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "source"))


@pytest.fixture
def existing(packed_dir: Path, target: Path) -> Path:
    """A packed checkpoint at `target`."""
    return Path(shutil.copytree(packed_dir, target))


@pytest.fixture
def packed_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers that really get quantised from here on."""
    layers: list[int] = []

    def counted(*args, where: str, **options):
        layers.append(int(where.split(".layers.")[1].split(".")[0]))
        return quantize_experts(*args, where=where, **options)

    monkeypatch.setattr(module, "quantize_experts", counted)
    return layers


@pytest.fixture
def stopped(pack: Callable[..., Any], target: Path, packed_layers: list[int]) -> Callable[..., Path]:
    """Stop a quantisation to `target` after some files: returns where they are kept."""

    def stop(after: int, error: type[BaseException] = Stop, **options: Any) -> Path:
        with pytest.raises(error):
            pack(**options, progress=stop_after(after, error))
        packed_layers.clear()
        return partial_path(target)

    return stop


def killed(partial: Path) -> None:
    """What a kill leaves: a file that was not recorded, a temporary one, a record half-written."""
    (partial / FILES[1]).write_bytes((partial / FILES[0]).read_bytes()[:100])
    (partial / ".tmpAbCd").write_bytes(b"half")
    (partial / ".progress.json.x.new").write_text('{"fingerpr')


def record(text: str) -> Callable[[Path], object]:
    return lambda partial: (partial / "progress.json").write_text(text)


class TestResult:
    def test_files(self, tiny_dir: Path, packed_dir: Path):
        copied = {f.name for f in tiny_dir.iterdir() if f.suffix in (".json", ".jinja")}
        assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= copied
        written = {"w4_meta.json", "quant_report.json", "manifest.json", INDEX}
        before, after = contents(tiny_dir), contents(packed_dir)
        assert after.keys() == {*FILES, *copied, *written}
        assert list(packed_dir.parent.iterdir()) == [packed_dir]
        for name in copied - {"config.json"}:
            assert after[name] == before[name]
        assert len({(packed_dir / name).stat().st_mode for name in (*FILES, "config.json")}) == 1

    def test_config_says_the_method_and_is_else_the_same(self, tiny_dir: Path, packed_dir: Path):
        config = json.loads((packed_dir / "config.json").read_text())
        method = {"quant_method": "dg-w4a16-v1", "group_gate_up": 16, "group_down": 8}
        assert config.pop("quantization_config") == method
        assert config == json.loads((tiny_dir / "config.json").read_text())
        meta = json.loads((packed_dir / "w4_meta.json").read_text())
        assert meta["format"] == "dg-w4a16-v1" and (meta["group_gate_up"], meta["group_down"]) == (16, 8)
        assert meta["source"] == tiny_dir.name

    def test_nothing_but_experts_changes(self, tiny_dir: Path, tiny_hf, packed_dir: Path):
        """Every other tensor is there bit for bit under its own name, the vision tower included.

        The published loader's way, load_state_dict of model*.safetensors, leaves nothing unexpected.
        """
        source, kept, state = (
            load_file(tiny_dir / "model.safetensors"),
            load_file(packed_dir / KEPT),
            tiny_hf.state_dict(),
        )
        assert kept.keys() == {name for name in source if ".experts." not in name}
        assert sum("vision" in name for name in kept) > 10
        for name, tensor in kept.items():
            assert tensor.dtype == source[name].dtype and torch.equal(tensor, source[name]), name
            assert torch.equal(tensor, state[name]), name

    def test_expert_files_hold_the_published_names(self, packed_dir: Path):
        assert PACKED_NAMES == ("gu_q", "gu_s", "gu_z", "dn_q", "dn_s", "dn_z")
        for i, file in enumerate(FILES[:3]):
            names = {f"model.decoder.layers.{i}.experts.{name}" for name in PACKED_NAMES}
            assert load_file(packed_dir / file).keys() == names

    def test_tied_copies_are_written_once(self, packed_dir: Path, source: Path, target: Path, pack):
        def doubled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            twins = {n.replace("model.decoder.", "model.encoder.language_model."): t for n, t in tensors.items()}
            own = {n: t.clone() for n, t in twins.items() if "self_conditioning" not in n and n not in tensors}
            return {**tensors, **own, "lm_head.weight": tensors["model.decoder.embed_tokens.weight"].clone()}

        rewrite(source / "model.safetensors", doubled)
        pack(source)
        assert contents(target)[KEPT] == contents(packed_dir)[KEPT]

    def test_manifest_describes_the_bytes_on_disk(self, packed_dir: Path):
        manifest, held = json.loads((packed_dir / "manifest.json").read_text()), contents(packed_dir)
        assert manifest["files"].keys() == held.keys() - {"manifest.json"}
        for name, entry in manifest["files"].items():
            assert entry["bytes"] == len(held[name])
            if not name.endswith(".safetensors"):
                assert entry["sha256"] == hashlib.sha256(held[name]).hexdigest()
        seen = {}
        for name in FILES:
            start = 8 + int.from_bytes(held[name][:8], "little")
            header = json.loads(held[name][8:start])
            header.pop("__metadata__", None)
            for tensor, head in header.items():
                begin, end = head["data_offsets"]
                digest = hashlib.sha256(held[name][start + begin : start + end]).hexdigest()
                seen[tensor] = {"file": name, "dtype": head["dtype"], "shape": head["shape"], "sha256": digest}
        assert manifest["tensors"] == seen

    def test_two_runs_write_the_same_bytes(self, packed_dir: Path, target: Path, pack):
        """Into an empty directory, too."""
        target.mkdir()
        pack()
        assert contents(target) == contents(packed_dir)

    def test_shards(self, packed_dir: Path, target: Path, pack, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(writing, "SHARD_BYTES", 40_000)
        pack()
        shards = sorted(target.glob("model-*.safetensors"))
        assert len(shards) > 1 and not (target / "model.safetensors").exists()
        assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
        index = json.loads((target / INDEX).read_text())
        held = {name: file.name for file in target.glob("*.safetensors") for name in load_file(file)}
        assert index["weight_map"] == held
        assert {n for n in held if ".experts." not in n} == load_file(packed_dir / KEPT).keys()
        tensors = [t for file in target.glob("*.safetensors") for t in load_file(file).values()]
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors)
        for shard in shards:
            sizes = [t.nbytes for t in load_file(shard).values()]
            assert sum(sizes) <= 40_000 or len(sizes) == 1
        got, want = load_checkpoint(target, verify=True).weights, load_checkpoint(packed_dir).weights
        for (name, a), (_, b) in zip(iter_tensors(got), iter_tensors(want), strict=True):
            assert torch.equal(a, b), name


def test_report(tiny_dir: Path, tiny_hf, packed_dir: Path, pack):
    """Its numbers, and that it is saved beside the weights without paths of the machine."""
    report, state, written = pack(), tiny_hf.state_dict(), stored(packed_dir)
    assert [t.name for t in report.tensors] == [
        f"model.decoder.layers.{i}.experts.{p}" for i in range(3) for p in ("gate_up_proj", "down_proj")
    ]
    for tensor in report.tensors:
        stem, part = tensor.name.rsplit(".", 1)[0], "gu" if "gate_up" in tensor.name else "dn"
        got = dequantize(*(written[f"{stem}.{part}_{k}"] for k in "qsz")).double()
        want = state[tensor.name].double()
        relative = ((got - want).norm() / want.norm()).item()
        assert tensor.relative_error == pytest.approx(relative, rel=1e-5)
        assert tensor.sqnr_db == pytest.approx(-20 * math.log10(relative), abs=1e-4)
        assert 20 < tensor.sqnr_db < 27  # groups of 16 and 8 Gaussians
    tensors = {n: t.nbytes for n, t in load_file(tiny_dir / "model.safetensors").items()}
    assert report.bytes_before == sum(tensors.values())
    assert report.bytes_after == sum(t.nbytes for f in FILES for t in load_file(packed_dir / f).values())
    kept = {k.part: (k.tensors, k.bytes) for k in report.kept}
    assert sum(b for _, b in kept.values()) == sum(b for n, b in tensors.items() if ".experts." not in n)
    assert kept["embedding"] == (1, tensors["model.decoder.embed_tokens.weight"])
    vision = [b for n, b in tensors.items() if "vision" in n]
    assert kept["vision"] == (len(vision), sum(vision))
    assert list(kept) == ["embedding", "attention", "dense MLP", "router", "norms", "self-conditioning", "vision"]
    assert all(k.reason for k in report.kept)
    saved = (packed_dir / "quant_report.json").read_text()
    assert json.loads(saved) == report.to_dict()
    assert str(tiny_dir.parent) not in saved + (packed_dir / "w4_meta.json").read_text()


class TestResume:
    @pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, SystemExit])
    @pytest.mark.parametrize("after", [1, 2, 5])
    def test_resumes_at_the_next_layer(self, packed_dir, target, pack, stopped, packed_layers, error, after):
        partial = stopped(after, error)
        assert not target.exists()
        assert {f.name for f in partial.glob("*.safetensors")} == set(FILES[:after])
        calls: list[tuple[int, int]] = []
        pack(progress=lambda *call: calls.append(call))
        assert packed_layers == list(range(after, 3))
        assert calls == [(i, 5) for i in range(1, 6)]
        assert contents(target) == contents(packed_dir)
        assert list(target.parent.iterdir()) == [target]

    @pytest.mark.parametrize(("after", "damage", "made_again"), [
        (1, killed, [1, 2]),
        (3, lambda partial: flip(partial / FILES[1]), [1]),
        (3, lambda partial: os.truncate(partial / FILES[1], (partial / FILES[1]).stat().st_size - 1), [1]),
        (3, lambda partial: (partial / FILES[1]).unlink(), [1]),
        *((2, record(text), [0, 1, 2]) for text in ("", "{", "[]", '{"fingerprint": 1}')),
    ], ids=["killed", "flip", "cut", "remove", "no record", "half a record", "a list", "an odd record"])  # fmt: skip
    def test_what_was_damaged_meanwhile_is_made_again(
        self, packed_dir, target, pack, stopped, packed_layers, after, damage, made_again
    ):
        damage(stopped(after))
        pack()
        assert packed_layers == made_again and contents(target) == contents(packed_dir)

    def test_killed_before_the_first_record(self, packed_dir: Path, target: Path, pack):
        partial_path(target).mkdir()
        (partial_path(target) / ".progress.json.x.new").write_text('{"fingerpr')
        pack()
        assert contents(target) == contents(packed_dir)

    def test_other_settings_start_afresh(self, target: Path, pack, stopped, packed_layers: list[int]):
        stopped(2, spec=COARSER)
        pack()
        assert packed_layers == [0, 1, 2]
        assert open_checkpoint(target, verify=True).spec == SPEC

    def test_another_source_starts_afresh(self, source, target, pack, stopped, packed_layers: list[int]):
        stopped(2, source=source)
        rewrite(source / "model.safetensors", lambda t: t["model.decoder.layers.0.experts.down_proj"].mul_(2))
        pack(source)
        assert packed_layers == [0, 1, 2]
        got, want = load_checkpoint(target).weights, load_checkpoint(source, spec=SPEC).weights
        assert torch.equal(got.layers[0].experts.dn_s, want.layers[0].experts.dn_s)

    def test_a_directory_of_somebody_else_is_not_emptied(self, target: Path, pack):
        thesis = partial_path(target) / "thesis.txt"
        thesis.parent.mkdir()
        thesis.write_text("only copy")
        with pytest.raises(CheckpointError, match=r"thesis\.txt: not written by Redraft"):
            pack()
        assert thesis.read_text() == "only copy"

    def test_one_writer_at_a_time(self, target: Path, pack):
        partial_path(target).mkdir()
        with (partial_path(target) / "lock").open("w") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            with pytest.raises(UsageError, match="another process is writing the same target"):
                pack()
        pack()
        assert (target / "manifest.json").exists()


FULL_DISK = {
    "ENOSPC": OSError(errno.ENOSPC, "No space left on device"),
    "EDQUOT": OSError(errno.EDQUOT, "Disk quota exceeded"),
    "safetensors": SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    "old safetensors": SafetensorError(
        'Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No space" })'
    ),
}


class TestDisk:
    @pytest.mark.parametrize("error", FULL_DISK.values(), ids=FULL_DISK)
    def test_disk_fills_up(self, tiny_dir: Path, packed_dir: Path, target: Path, pack, monkeypatch, error: Exception):
        monkeypatch.setattr(writing, "_SPARE_BYTES", 0)

        def save(tensors, path, metadata):
            if path.name == FILES[2]:
                path.write_bytes(b"half")
                raise error
            save_file(tensors, path, metadata)

        with monkeypatch.context() as patch:
            patch.setattr(writing, "save_file", save)
            with pytest.raises(CheckpointError) as caught:
                pack()
        message = str(caught.value)
        assert message.startswith(f"{target}: the disk is too small: ") and "\n" not in message
        assert "2 finished files are kept in .w4.partial" in message
        still = sum(t.nbytes for f in FILES[2:] for t in load_file(packed_dir / f).values())
        side = sum(f.stat().st_size for f in tiny_dir.iterdir() if f.suffix in (".json", ".jinja"))
        needed = f"{still + side:,} more bytes are needed"
        assert needed in message
        assert not target.exists()
        assert not (partial_path(target) / FILES[2]).exists(), "what fills the disk should be gone"
        with monkeypatch.context() as patch:
            patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5))
            with pytest.raises(CheckpointError, match=f"{needed}, 5 are free; 2 finished"):
                pack()
        pack()
        assert contents(target) == contents(packed_dir)

    def test_disk_too_small_is_found_beforehand(self, tmp_path: Path, pack, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1234))
        monkeypatch.setattr(writing, "save_file", lambda *_, **__: pytest.fail("started to write"))
        message = r"the disk is too small: [\d,]+ more bytes are needed, 1,234 are free"
        with pytest.raises(CheckpointError, match=message):
            pack()
        assert list(tmp_path.iterdir()) == []

    def test_other_write_failure(self, tmp_path: Path, pack, monkeypatch: pytest.MonkeyPatch):
        def save(*_: object, **__: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(writing, "save_file", save)
        with pytest.raises(CheckpointError, match=r"w4: cannot be written \(Input/output error\)"):
            pack()
        assert list(tmp_path.iterdir()) == []

    def test_parents_are_made(self, tiny_dir: Path, tmp_path: Path):
        quantize(tiny_dir, tmp_path / "a" / "b" / "w4", SPEC)
        assert open_checkpoint(tmp_path / "a" / "b" / "w4", verify=True).spec == SPEC


@pytest.mark.parametrize(("names", "options", "error", "message"), [
    ("source packed", {}, UsageError, "exists and is not empty"),
    ("source file", {"overwrite": True}, UsageError, "is a file"),
    ("source home", {"overwrite": True}, UsageError, "holds no checkpoint"),
    *((f"source {p}", {"overwrite": True}, UsageError, "lies within the source") for p in (
        "source/.", "source/inside", "source/..", "link",
    )),
    *((f"source {p}", {}, CheckpointError, rf"PATH/{p}: cannot be written \(Not a directory\)") for p in (
        "file/w4", "file/deeper/w4",
    )),
    ("packed w4", {}, CheckpointError, "is already packed"),
    ("source w4", {"spec": QuantSpec(16)}, UsageError, "group_down 64 does not divide moe_intermediate_size 16"),
])  # fmt: skip
def test_refused(packed_dir: Path, source: Path, tmp_path: Path, names: str, options, error, message: str):
    """From one of these places to another, without changing anything."""
    shutil.copytree(packed_dir, tmp_path / "packed")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "file").write_text("a regular file")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("only copy")

    def tree() -> dict[Path, bytes | None]:
        return {path: path.read_bytes() if path.is_file() else None for path in tmp_path.rglob("*")}

    before = tree()
    with pytest.raises(error, match=message.replace("PATH", str(tmp_path))):
        quantize(*(tmp_path / name for name in names.split()), **{"spec": SPEC, **options})
    assert tree() == before


class TestTarget:
    def test_overwrite_replaces_everything(self, existing: Path, pack):
        (existing / "left over").write_text("x")
        pack(spec=COARSER, overwrite=True)
        assert open_checkpoint(existing, verify=True).spec == COARSER
        assert not (existing / "left over").exists() and list(existing.parent.iterdir()) == [existing]

    def test_overwrite_keeps_the_old_one_until_the_end(self, packed_dir: Path, existing: Path, pack):
        with pytest.raises(Stop):
            pack(spec=COARSER, overwrite=True, progress=stop_after(5))
        assert contents(existing) == contents(packed_dir)

    def test_failed_exchange_puts_the_old_one_back(self, packed_dir: Path, existing: Path, pack, monkeypatch):
        rename = Path.rename

        def fail(self: Path, to: Path) -> Path:
            if self.name.endswith(".partial"):
                raise OSError(errno.EIO, "Input/output error")
            return rename(self, to)

        monkeypatch.setattr(Path, "rename", fail)
        with pytest.raises(CheckpointError, match="cannot be written"):
            pack(spec=COARSER, overwrite=True)
        assert contents(existing) == contents(packed_dir)

    def test_death_between_the_renames_is_repaired(self, packed_dir: Path, target: Path, pack):
        shutil.copytree(packed_dir, target.parent / ".w4.replaced")
        with pytest.raises(UsageError, match="exists and is not empty"):
            pack()
        assert contents(target) == contents(packed_dir)


class TestSource:
    def test_non_finite_weights(self, source: Path, target: Path, pack):
        def broken(tensors: dict[str, torch.Tensor]) -> None:
            tensors["model.decoder.layers.1.experts.gate_up_proj"][3, 5, 7] = math.inf

        rewrite(source / "model.safetensors", broken)
        place = r"model\.safetensors: tensor model\.decoder\.layers\.1\.experts\.gate_up_proj\[3\]: 1 of 1024 weights"
        for work in (pack, load_checkpoint):
            with pytest.raises(CheckpointError, match=place):
                work(source, spec=SPEC)
        assert not target.exists()

    def test_cut_short_under_way(self, source: Path, target: Path, pack):
        def cut(done: int, total: int) -> None:
            if done == 1:
                os.truncate(source / "model.safetensors", 1000)

        with pytest.raises(CheckpointError, match=r"source/model\.safetensors: tensor model\.\S+ cannot be read"):
            pack(source, progress=cut)
        assert not target.exists()


@pytest.mark.parametrize("target", ["", ".", ".."])
def test_the_current_directory_is_no_target(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="current directory"):
        quantize(Path(module.__file__).parents[1] / "demo" / "checkpoint", target)
    assert not any(tmp_path.iterdir())
