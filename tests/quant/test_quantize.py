"""Writing packed checkpoints: what is in them, and what is left behind by everything that can go wrong."""

from __future__ import annotations

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

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import redraft.quant.quantize as module
import redraft.store.write as rewrite
from redraft.config import QuantSpec
from redraft.errors import CheckpointError, UsageError
from redraft.kernels.packing import dequantize
from redraft.network.weights import iter_tensors
from redraft.quant.load import load_checkpoint
from redraft.quant.quantize import quantize
from redraft.quant.rtn import quantize_experts
from redraft.store.read import open_checkpoint
from redraft.store.workdir import partial_path

SPEC = QuantSpec(16, 8)
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
def whole(packed_dir: Path) -> Path:
    """An uninterrupted quantisation, to compare with."""
    return packed_dir


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "w4"


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


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
def stopped(tiny_dir: Path, target: Path, packed_layers: list[int]) -> Callable[..., Path]:
    """Stop a quantisation to `target` after some files: returns where they are kept."""

    def stop(after: int, spec: QuantSpec = SPEC, source: Path = tiny_dir, error: type[BaseException] = Stop) -> Path:
        with pytest.raises(error):
            quantize(source, target, spec, progress=stop_after(after, error))
        packed_layers.clear()
        return partial_path(target)

    return stop


def flip(file: Path) -> None:
    """Change the last bit."""
    raw = file.read_bytes()
    file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))


def killed(partial: Path) -> None:
    """What a kill leaves: a file that was not recorded, a temporary one, a record half-written."""
    (partial / FILES[1]).write_bytes((partial / FILES[0]).read_bytes()[:100])
    (partial / ".tmpAbCd").write_bytes(b"half")
    (partial / ".progress.json.x.new").write_text('{"fingerpr')


def record(text: str) -> Callable[[Path], object]:
    return lambda partial: (partial / "progress.json").write_text(text)


class TestResult:
    def test_files(self, tiny_dir: Path, whole: Path):
        copied = {f.name for f in tiny_dir.iterdir() if f.suffix in (".json", ".jinja")}
        assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= copied
        written = {"w4_meta.json", "quant_report.json", "manifest.json", INDEX}
        assert {f.name for f in whole.iterdir()} == {*FILES, *copied, *written}
        assert list(whole.parent.iterdir()) == [whole]
        for name in copied - {"config.json"}:
            assert (whole / name).read_bytes() == (tiny_dir / name).read_bytes()

    def test_config_says_the_method_and_is_else_the_same(self, tiny_dir: Path, whole: Path):
        config = json.loads((whole / "config.json").read_text())
        method = {"quant_method": "dg-w4a16-v1", "group_gate_up": 16, "group_down": 8}
        assert config.pop("quantization_config") == method
        assert config == json.loads((tiny_dir / "config.json").read_text())

    def test_meta(self, whole: Path, tiny_dir: Path):
        meta = json.loads((whole / "w4_meta.json").read_text())
        assert meta["format"] == "dg-w4a16-v1" and (meta["group_gate_up"], meta["group_down"]) == (16, 8)
        assert meta["source"] == tiny_dir.name

    def test_nothing_but_experts_changes(self, tiny_dir: Path, whole: Path):
        """Every other tensor is there bit for bit under its own name, the vision tower included."""
        source = load_file(tiny_dir / "model.safetensors")
        kept = load_file(whole / KEPT)
        assert kept.keys() == {name for name in source if ".experts." not in name}
        assert sum("vision" in name for name in kept) > 10
        for name, tensor in kept.items():
            assert tensor.dtype == source[name].dtype and torch.equal(tensor, source[name]), name

    def test_expert_files_hold_the_published_names(self, whole: Path):
        for i, file in enumerate(FILES[:3]):
            names = {f"model.decoder.layers.{i}.experts.{n}" for n in ("gu_q", "gu_s", "gu_z", "dn_q", "dn_s", "dn_z")}
            assert load_file(whole / file).keys() == names

    def test_tied_copies_are_written_once(self, tiny_dir: Path, whole: Path, tmp_path: Path):
        both = shutil.copytree(tiny_dir, tmp_path / "both")
        tensors = load_file(both / "model.safetensors")
        copies = {n.replace("model.decoder.", "model.encoder.language_model."): t.clone() for n, t in tensors.items()}
        head = tensors["model.decoder.embed_tokens.weight"].clone()
        own = {n: t for n, t in copies.items() if "self_conditioning" not in n and n not in tensors}
        save_file({**tensors, **own, "lm_head.weight": head}, both / "model.safetensors")
        quantize(both, tmp_path / "w4", SPEC)
        assert contents(tmp_path / "w4")[KEPT] == contents(whole)[KEPT]

    def test_manifest_describes_the_bytes_on_disk(self, whole: Path):
        manifest = json.loads((whole / "manifest.json").read_text())
        assert manifest["files"].keys() == {f.name for f in whole.iterdir()} - {"manifest.json"}
        for name, entry in manifest["files"].items():
            assert entry["bytes"] == (whole / name).stat().st_size
            if not name.endswith(".safetensors"):
                assert entry["sha256"] == hashlib.sha256((whole / name).read_bytes()).hexdigest()
        seen = set()
        for name in FILES:
            raw = (whole / name).read_bytes()
            start = 8 + int.from_bytes(raw[:8], "little")
            for tensor, head in json.loads(raw[8:start]).items():
                if tensor == "__metadata__":
                    continue
                begin, end = head["data_offsets"]
                digest = hashlib.sha256(raw[start + begin : start + end]).hexdigest()
                expected = {"file": name, "dtype": head["dtype"], "shape": head["shape"], "sha256": digest}
                assert manifest["tensors"][tensor] == expected
                seen.add(tensor)
        assert manifest["tensors"].keys() == seen

    def test_files_are_as_readable_as_any_other(self, whole: Path):
        plain = whole / "config.json"
        assert {(whole / f).stat().st_mode for f in FILES} == {plain.stat().st_mode}

    def test_two_runs_write_the_same_bytes(self, tiny_dir: Path, whole: Path, tmp_path: Path):
        quantize(tiny_dir, tmp_path / "again", SPEC)
        assert contents(tmp_path / "again") == contents(whole)

    def test_transformers_can_read_what_was_kept(self, tiny_hf, whole: Path):
        """The published loader's way: load_state_dict of model*.safetensors leaves nothing unexpected."""
        state = tiny_hf.state_dict()
        for name, tensor in load_file(whole / KEPT).items():
            assert name in state and torch.equal(state[name], tensor)

    def test_shards(self, tiny_dir: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(rewrite, "SHARD_BYTES", 40_000)
        quantize(tiny_dir, tmp_path / "w4", SPEC)
        shards = sorted((tmp_path / "w4").glob("model-*.safetensors"))
        assert len(shards) > 1 and not (tmp_path / "w4" / "model.safetensors").exists()
        assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
        index = json.loads((tmp_path / "w4" / "model.safetensors.index.json").read_text())
        held = {name: s.name for s in (tmp_path / "w4").glob("*.safetensors") for name in load_file(s)}
        assert index["weight_map"] == held
        assert {n for n in held if ".experts." not in n} == load_file(whole / KEPT).keys()
        everything = [t for s in (tmp_path / "w4").glob("*.safetensors") for t in load_file(s).values()]
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in everything)
        for s in shards:
            sizes = [t.nbytes for t in load_file(s).values()]
            assert sum(sizes) <= 40_000 or len(sizes) == 1
        got = load_checkpoint(tmp_path / "w4", verify=True).weights
        for (name, a), (_, b) in zip(iter_tensors(got), iter_tensors(load_checkpoint(whole).weights), strict=True):
            assert torch.equal(a, b), name


class TestReport:
    def test_numbers(self, tiny_dir: Path, tiny_hf, whole: Path, tmp_path: Path):
        report = quantize(tiny_dir, tmp_path / "w4", SPEC)
        state = tiny_hf.state_dict()
        assert [t.name for t in report.tensors] == [
            f"model.decoder.layers.{i}.experts.{p}" for i in range(3) for p in ("gate_up_proj", "down_proj")
        ]
        for tensor in report.tensors:
            part = "gu" if "gate_up" in tensor.name else "dn"
            stem = tensor.name.rsplit(".", 1)[0]
            packed = load_file(whole / f"experts_00{stem.split('.')[3]}.safetensors")
            got = dequantize(*(packed[f"{stem}.{part}_{k}"] for k in "qsz")).double()
            want = state[tensor.name].double()
            relative = ((got - want).norm() / want.norm()).item()
            assert tensor.relative_error == pytest.approx(relative, rel=1e-5)
            assert tensor.sqnr_db == pytest.approx(-20 * math.log10(relative), abs=1e-4)
            assert 20 < tensor.sqnr_db < 27  # groups of 16 and 8 Gaussians
        tensors = {n: t.nbytes for n, t in load_file(tiny_dir / "model.safetensors").items()}
        assert report.bytes_before == sum(tensors.values())
        assert report.bytes_after == sum(t.nbytes for f in FILES for t in load_file(whole / f).values())
        kept = {k.part: (k.tensors, k.bytes) for k in report.kept}
        assert sum(b for _, b in kept.values()) == sum(b for n, b in tensors.items() if ".experts." not in n)
        assert kept["embedding"] == (1, tensors["model.decoder.embed_tokens.weight"])
        vision = [b for n, b in tensors.items() if "vision" in n]
        assert kept["vision"] == (len(vision), sum(vision))
        parts = ["embedding", "attention", "dense MLP", "router", "norms", "self-conditioning", "vision"]
        assert list(kept) == parts
        assert all(k.reason for k in report.kept)

    def test_saved_beside_the_weights_without_paths_of_the_machine(self, tiny_dir: Path, whole: Path, tmp_path: Path):
        report = quantize(tiny_dir, tmp_path / "w4", SPEC)
        saved = (whole / "quant_report.json").read_text()
        assert json.loads(saved) == report.to_dict()
        assert str(tiny_dir.parent) not in saved + (whole / "w4_meta.json").read_text()


class TestResume:
    @pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, SystemExit])
    @pytest.mark.parametrize("after", [1, 2, 5])
    def test_resumes_at_the_next_layer(
        self, tiny_dir: Path, whole: Path, target: Path, stopped, packed_layers: list[int], error: type, after: int
    ):
        partial = stopped(after, error=error)
        assert not target.exists()
        assert {f.name for f in partial.glob("*.safetensors")} == set(FILES[:after])
        calls: list[tuple[int, int]] = []
        quantize(tiny_dir, target, SPEC, progress=lambda *call: calls.append(call))
        assert packed_layers == list(range(after, 3))
        assert calls == [(i, 5) for i in range(1, 6)]
        assert contents(target) == contents(whole)
        assert list(target.parent.iterdir()) == [target]

    @pytest.mark.parametrize(
        ("after", "damage", "made_again"),
        [
            (1, killed, [1, 2]),
            (3, lambda partial: flip(partial / FILES[1]), [1]),
            (3, lambda partial: os.truncate(partial / FILES[1], (partial / FILES[1]).stat().st_size - 1), [1]),
            (3, lambda partial: (partial / FILES[1]).unlink(), [1]),
            *((2, record(text), [0, 1, 2]) for text in ("", "{", "[]", '{"fingerprint": 1}')),
        ],
        ids=["killed", "flip", "cut", "remove", "no record", "half a record", "a list", "an odd record"],
    )
    def test_what_was_damaged_meanwhile_is_made_again(
        self, tiny_dir: Path, whole: Path, target: Path, stopped, packed_layers: list[int], after, damage, made_again
    ):
        damage(stopped(after))
        quantize(tiny_dir, target, SPEC)
        assert packed_layers == made_again and contents(target) == contents(whole)

    def test_killed_before_the_first_record(self, tiny_dir: Path, whole: Path, target: Path):
        partial_path(target).mkdir()
        (partial_path(target) / ".progress.json.x.new").write_text('{"fingerpr')
        quantize(tiny_dir, target, SPEC)
        assert contents(target) == contents(whole)

    def test_other_settings_start_afresh(self, tiny_dir: Path, target: Path, stopped, packed_layers: list[int]):
        stopped(2, QuantSpec(32, 16))
        quantize(tiny_dir, target, SPEC)
        assert packed_layers == [0, 1, 2]
        assert open_checkpoint(target, verify=True).spec == SPEC

    def test_another_source_starts_afresh(
        self, tiny_dir: Path, tmp_path: Path, target: Path, stopped, packed_layers: list[int]
    ):
        source = Path(shutil.copytree(tiny_dir, tmp_path / "source"))
        stopped(2, source=source)
        tensors = load_file(source / "model.safetensors")
        tensors["model.decoder.layers.0.experts.down_proj"] *= 2
        save_file(tensors, source / "model.safetensors")
        quantize(source, target, SPEC)
        assert packed_layers == [0, 1, 2]
        got, want = load_checkpoint(target).weights, load_checkpoint(source, spec=SPEC).weights
        assert torch.equal(got.layers[0].experts.dn_s, want.layers[0].experts.dn_s)

    def test_a_directory_of_somebody_else_is_not_emptied(self, tiny_dir: Path, target: Path):
        partial = partial_path(target)
        partial.mkdir()
        (partial / "thesis.txt").write_text("only copy")
        with pytest.raises(CheckpointError, match=r"thesis\.txt: not written by Redraft"):
            quantize(tiny_dir, target, SPEC)
        assert (partial / "thesis.txt").read_text() == "only copy"

    def test_one_writer_at_a_time(self, tiny_dir: Path, target: Path):
        partial = partial_path(target)
        partial.mkdir()
        with (partial / "lock").open("w") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            with pytest.raises(UsageError, match="another process is writing the same target"):
                quantize(tiny_dir, target, SPEC)
        quantize(tiny_dir, target, SPEC)
        assert (target / "manifest.json").exists()


FULL_DISK = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    SafetensorError('Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No space" })'),
]


class TestDisk:
    @pytest.mark.parametrize("error", FULL_DISK, ids=["ENOSPC", "EDQUOT", "safetensors", "old safetensors"])
    def test_disk_fills_up(
        self, tiny_dir: Path, whole: Path, target: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
    ):
        monkeypatch.setattr(rewrite, "_SPARE_BYTES", 0)

        def save(tensors, path, metadata):
            if path.name == FILES[2]:
                path.write_bytes(b"half")
                raise error
            save_file(tensors, path, metadata)

        with monkeypatch.context() as patch:
            patch.setattr(rewrite, "save_file", save)
            with pytest.raises(CheckpointError) as caught:
                quantize(tiny_dir, target, SPEC)
        message = str(caught.value)
        assert message.startswith(f"{target}: the disk is too small: ") and "\n" not in message
        assert "2 finished files are kept in .w4.partial" in message
        still = sum(t.nbytes for f in FILES[2:] for t in load_file(whole / f).values())
        side = sum(f.stat().st_size for f in tiny_dir.iterdir() if f.suffix in (".json", ".jinja"))
        assert f"{still + side:,} more bytes are needed" in message
        assert not target.exists()
        assert not (partial_path(target) / FILES[2]).exists(), "what fills the disk should be gone"
        with monkeypatch.context() as patch:
            patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5))
            needed = f"{still + side:,} more bytes are needed, 5 are free; 2 finished"
            with pytest.raises(CheckpointError, match=needed):
                quantize(tiny_dir, target, SPEC)
        quantize(tiny_dir, target, SPEC)
        assert contents(target) == contents(whole)

    def test_disk_too_small_is_found_beforehand(self, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1234))
        monkeypatch.setattr(rewrite, "save_file", lambda *_, **__: pytest.fail("started to write"))
        message = r"the disk is too small: [\d,]+ more bytes are needed, 1,234 are free"
        with pytest.raises(CheckpointError, match=message):
            quantize(tiny_dir, tmp_path / "w4", SPEC)
        assert list(tmp_path.iterdir()) == []

    def test_other_write_failure(self, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def save(*_: object, **__: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(rewrite, "save_file", save)
        with pytest.raises(CheckpointError, match=r"w4: cannot be written \(Input/output error\)"):
            quantize(tiny_dir, tmp_path / "w4", SPEC)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("name", ["file/w4", "file/deeper/w4"])
    def test_unwritable_target(self, tiny_dir: Path, tmp_path: Path, name: str):
        (tmp_path / "file").write_text("a regular file")
        with pytest.raises(CheckpointError, match=rf"{tmp_path / name}: cannot be written \(Not a directory\)"):
            quantize(tiny_dir, tmp_path / name, SPEC)
        assert [f.name for f in tmp_path.iterdir()] == ["file"]

    def test_parents_are_made(self, tiny_dir: Path, tmp_path: Path):
        quantize(tiny_dir, tmp_path / "a" / "b" / "w4", SPEC)
        assert open_checkpoint(tmp_path / "a" / "b" / "w4", verify=True).spec == SPEC


class TestTarget:
    def test_not_empty(self, tiny_dir: Path, whole: Path):
        before = contents(whole)
        with pytest.raises(UsageError, match="exists and is not empty"):
            quantize(tiny_dir, whole, SPEC)
        assert contents(whole) == before

    def test_empty_directory_is_fine(self, tiny_dir: Path, whole: Path, tmp_path: Path):
        (tmp_path / "w4").mkdir()
        quantize(tiny_dir, tmp_path / "w4", SPEC)
        assert contents(tmp_path / "w4") == contents(whole)

    def test_overwrite_replaces_everything(self, tiny_dir: Path, whole: Path, tmp_path: Path):
        target = Path(shutil.copytree(whole, tmp_path / "w4"))
        (target / "left over").write_text("x")
        quantize(tiny_dir, target, QuantSpec(32, 16), overwrite=True)
        assert open_checkpoint(target, verify=True).spec == QuantSpec(32, 16)
        assert not (target / "left over").exists() and list(tmp_path.iterdir()) == [target]

    def test_overwrite_keeps_the_old_one_until_the_end(self, tiny_dir: Path, whole: Path, tmp_path: Path):
        target = Path(shutil.copytree(whole, tmp_path / "w4"))
        with pytest.raises(Stop):
            quantize(tiny_dir, target, QuantSpec(32, 16), overwrite=True, progress=stop_after(5))
        assert contents(target) == contents(whole)

    def test_failed_exchange_puts_the_old_one_back(
        self, tiny_dir: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        target = Path(shutil.copytree(whole, tmp_path / "w4"))
        rename = Path.rename

        def fail(self: Path, to: Path) -> Path:
            if self.name.endswith(".partial"):
                raise OSError(errno.EIO, "Input/output error")
            return rename(self, to)

        monkeypatch.setattr(Path, "rename", fail)
        with pytest.raises(CheckpointError, match="cannot be written"):
            quantize(tiny_dir, target, QuantSpec(32, 16), overwrite=True)
        assert contents(target) == contents(whole)

    def test_death_between_the_renames_is_repaired(self, tiny_dir: Path, whole: Path, tmp_path: Path):
        shutil.copytree(whole, tmp_path / ".w4.replaced")
        with pytest.raises(UsageError, match="exists and is not empty"):
            quantize(tiny_dir, tmp_path / "w4", SPEC)
        assert contents(tmp_path / "w4") == contents(whole)

    def test_overwrite_spares_what_is_no_checkpoint(self, tiny_dir: Path, tmp_path: Path):
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "thesis.txt").write_text("only copy")
        with pytest.raises(UsageError, match="holds no checkpoint"):
            quantize(tiny_dir, tmp_path / "home", SPEC, overwrite=True)
        assert (tmp_path / "home" / "thesis.txt").exists()

    def test_file(self, tiny_dir: Path, tmp_path: Path):
        (tmp_path / "w4").write_text("x")
        with pytest.raises(UsageError, match="is a file"):
            quantize(tiny_dir, tmp_path / "w4", SPEC, overwrite=True)

    @pytest.mark.parametrize("place", [".", "inside", ".."])
    def test_source_and_target_are_apart(self, tiny_dir: Path, tmp_path: Path, place: str):
        source = Path(shutil.copytree(tiny_dir, tmp_path / "source"))
        before = contents(source)
        with pytest.raises(UsageError, match="lies within the source"):
            quantize(source, source / place, SPEC, overwrite=True)
        assert contents(source) == before

    def test_symlink_to_the_source(self, tiny_dir: Path, tmp_path: Path):
        (tmp_path / "link").symlink_to(tiny_dir)
        with pytest.raises(UsageError, match="lies within the source"):
            quantize(tiny_dir, tmp_path / "link", SPEC, overwrite=True)


class TestSource:
    def test_packed_already(self, whole: Path, tmp_path: Path):
        with pytest.raises(CheckpointError, match="is already packed"):
            quantize(whole, tmp_path / "w4", SPEC)
        assert list(tmp_path.iterdir()) == []

    def test_indivisible_groups(self, tiny_dir: Path, tmp_path: Path):
        with pytest.raises(UsageError, match="group_down 64 does not divide moe_intermediate_size 16"):
            quantize(tiny_dir, tmp_path / "w4", QuantSpec(16))
        assert list(tmp_path.iterdir()) == []

    def test_non_finite_weights(self, tiny_dir: Path, tmp_path: Path):
        source = Path(shutil.copytree(tiny_dir, tmp_path / "source"))
        tensors = load_file(source / "model.safetensors")
        tensors["model.decoder.layers.1.experts.gate_up_proj"][3, 5, 7] = math.inf
        save_file(tensors, source / "model.safetensors")
        place = r"model\.safetensors: tensor model\.decoder\.layers\.1\.experts\.gate_up_proj\[3\]: 1 of 1024 weights"
        with pytest.raises(CheckpointError, match=place):
            quantize(source, tmp_path / "w4", SPEC)
        with pytest.raises(CheckpointError, match=place):
            load_checkpoint(source, spec=SPEC)
        assert not (tmp_path / "w4").exists()

    def test_cut_short_under_way(self, tiny_dir: Path, tmp_path: Path):
        source = Path(shutil.copytree(tiny_dir, tmp_path / "source"))

        def cut(done: int, total: int) -> None:
            if done == 1:
                os.truncate(source / "model.safetensors", 1000)

        with pytest.raises(CheckpointError, match=r"source/model\.safetensors: tensor model\.\S+ cannot be read"):
            quantize(source, tmp_path / "w4", SPEC, progress=cut)
        assert not (tmp_path / "w4").exists()
