"""`redraft export --remote-code`: the directory runs alone, bit for bit as with Redraft, or fails clearly."""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_runner import results
from same_bits import assert_same_bits, assert_same_weights, from_pretrained, hub_snapshot
from tiny import tiny_model
from transformers import AutoModelForMultimodalLM
from transformers.quantizers import auto

import redraft
from redraft.cli import main
from redraft.config import TIERS, QuantSpec
from redraft.errors import CheckpointError
from redraft.quant.quantize import export_compressed_tensors
from redraft.quant.remote_code import (
    COMPANION,
    ENTRY,
    ENTRY_NAME,
    bringing,
    bundle,
    export_remote_code,
    flat_name,
    needed_modules,
    rewritten,
)  # fmt: skip
from redraft.store.read import open_checkpoint

SPEC = QuantSpec(16, 8)
SMALL = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "canvas_length": 2}


@pytest.fixture(scope="module")
def exported(packed_dir, tmp_path_factory):
    target = tmp_path_factory.mktemp("remote") / "model-1.5"  # what is no Python identifier must not matter
    export_remote_code(packed_dir, target)
    return target


@pytest.fixture(scope="module")
def alone(exported):
    """What `remote_runner` found in a process that cannot import Redraft."""
    target, folder = exported.parent / "results.pt", exported.parent
    shutil.copytree(exported, hub_snapshot(folder / "hub", "model-1.5"))
    caches = {"HF_MODULES_CACHE": str(folder / "cache"), "HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    caches["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # sums of other lengths are other bits
    runner = [sys.executable, "-I", Path(__file__).with_name("remote_runner.py")]
    command = [*runner, exported, "org/model-1.5", target]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **caches}, cwd=folder, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return torch.load(target)


def test_without_redraft_all_tiers_compute_the_same_bits(alone, packed_dir):
    assert alone["modules"] == []
    model = from_pretrained(packed_dir)
    for tier in TIERS:
        report = redraft.accelerate(model, tier)
        assert_same_bits(alone[tier], results(model))
    assert alone["replaced"].items() <= report.replaced.items()
    assert alone["kept"].items() <= report.kept.items()
    assert_same_bits(model.state_dict(), alone["state"])


def test_saving_keeps_code_and_bits(alone, exported):
    assert not any(alone["info"].values())
    assert_same_bits(alone["again"], alone["state"])
    saved, written = ({p.name: p.read_bytes() for p in Path(d).glob("*.py")} for d in (f"{exported}-saved", exported))
    assert saved == written


def test_a_downloaded_repository_runs_alike(alone):
    assert_same_bits(alone["hub"], alone["off"])


def test_loads_with_neither_fail(alone):
    for way in ("without trust", "by transformers' own class"):
        assert alone[way].startswith("RuntimeError"), alone[way]
        assert "mismatch" in alone[way]
    assert "tier is 'fast', expected one of off, bitexact, turbo" in alone["unknown tier"]


def test_with_redraft_the_directory_is_like_any_other(exported, packed_dir, monkeypatch, tmp_path):
    """And its own code leaves the installed one alone, in whichever order they are used."""
    assert open_checkpoint(exported, verify=True).spec == SPEC
    assert_same_weights(packed_dir, exported)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    registered = auto.AUTO_QUANTIZER_MAPPING["dg-w4a16-v1"]
    remote = AutoModelForMultimodalLM.from_pretrained(exported, trust_remote_code=True, tier="off")
    assert type(remote).__name__ == "RedraftDiffusionGemma"
    assert type(remote).__module__.startswith("transformers_modules.")
    assert auto.AUTO_QUANTIZER_MAPPING["dg-w4a16-v1"] is registered
    installed = from_pretrained(exported)
    redraft.accelerate(installed, "off")
    assert torch.equal(results(remote)["logits"], results(installed)["logits"])


def test_every_packed_format_can_be_given(tmp_path):
    tiny_model(**SMALL, hidden_size=64, moe_intermediate_size=32).save_pretrained(tmp_path / "bf16")
    export_compressed_tensors(tmp_path / "bf16", tmp_path / "ct", group=32)
    export_remote_code(tmp_path / "ct", tmp_path / "out")
    assert_same_weights(tmp_path / "ct", tmp_path / "out")


# The modules


def test_modules_need_transformers_and_what_it_needs_only():
    allowed = {"torch", "triton", "transformers", "safetensors", "huggingface_hub", "numpy", "tokenizers"}
    files = bundle()
    for name, text in files.items():
        nodes = list(ast.walk(ast.parse(text)))
        found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        found |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
        assert {module.split(".")[0] for module in found} <= allowed | sys.stdlib_module_names, name
    assert "from .redraft_kernels_norms import" in files[f"{ENTRY_NAME}.py"]
    assert len(files) == len(needed_modules(ENTRY)) == len({flat_name(m) for m in needed_modules(ENTRY)})


def test_imports_are_rewritten_in_their_places():
    text = '''"""from redraft.store.names import x"""
from typing import TYPE_CHECKING

from redraft.store import dg_w4a16
from redraft.quant.rtn import (
    quantize_experts,
    quantize_rows as rows,
)

if TYPE_CHECKING:
    from redraft.engine.engine import Engine


def f():
    from redraft.store.names import part_of, DECODER

    return part_of
'''
    assert rewritten(text).splitlines() == [
        '"""from redraft.store.names import x"""',
        "from typing import TYPE_CHECKING",
        "",
        "from . import redraft_store_dg_w4a16 as dg_w4a16",
        "from .redraft_quant_rtn import quantize_experts, quantize_rows as rows",
        *[""] * 8,
        "def f():",
        "    from .redraft_store_names import part_of, DECODER",
        "",
        "    return part_of",
    ]


def test_a_file_that_a_module_reads_comes_along(tmp_path, monkeypatch):
    flat = tmp_path / "flat"
    flat.mkdir()
    text = "__device__ void f() {}\n// \"quoted\" 'and' \\ escaped \N{GREEK SMALL LETTER MU}\n"
    helper = f"{flat_name(COMPANION)}.py"
    files = bundle()
    (flat / helper).write_text(files[helper], encoding="utf-8")
    reader = "from pathlib import Path\nSOURCE = Path(__file__).with_name('kernel.cu')\n"
    (flat / "kernel.py").write_text(reader + bringing({"kernel.cu": text}), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("flat.kernel")
    assert module.SOURCE.read_text("utf-8") == text
    assert {p.name for p in flat.iterdir() if p.is_file()} == {"kernel.cu", "kernel.py", helper}
    everything = "".join(files.values())
    sources = Path(redraft.__file__).with_name("kernels").glob("*.cu")
    assert all(f"bring(__file__, {path.name!r}, " in everything for path in sources)


# The command


def run(capsys: Any, *args: object) -> tuple[int, str, str]:
    code = main(["export", *map(str, args)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_command_writes_and_says_how_to_load(capsys, packed_dir, tmp_path):
    target = tmp_path / "out"
    code, out, _ = run(capsys, packed_dir, target, "--remote-code", "--json")
    assert code == 0
    written = json.loads(out)
    assert "modeling_redraft.py" in written["modules"]
    assert sorted(p.name for p in target.glob("*.py")) == written["modules"]
    code, out, _ = run(capsys, packed_dir, target, "--remote-code", "--overwrite")
    assert code == 0
    assert f'AutoModelForMultimodalLM.from_pretrained("{target}", trust_remote_code=True, tier="turbo")' in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give either --remote-code or --format"),
        (["--remote-code", "--format", "compressed-tensors"], "give either --remote-code or --format"),
        (["--remote-code", "--group-size", "32"], "--group-size and --symmetric go with --format"),
    ],
)
def test_options_that_do_not_go_together(capsys, packed_dir, tmp_path, options, message):
    code, _, err = run(capsys, packed_dir, tmp_path / "out", *options)
    assert code == 2
    assert message in err
    assert not (tmp_path / "out").exists()


def test_an_unpacked_source_is_refused_with_the_command(tiny_dir, tmp_path):
    with pytest.raises(CheckpointError, match=r"is not packed; run `redraft quantize .* PACKED` and export PACKED"):
        export_remote_code(tiny_dir, tmp_path / "out")
