"""`redraft quantize` and `redraft inspect`, from the command line."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from cli.conftest import Run
from safetensors.torch import load_file
from tiny import edit_json, flip, tiny_config
from transformers import DiffusionGemmaForBlockDiffusion

from redraft.quant.quantize import quantize
from redraft.store.workdir import partial_path

GROUPS = ["--group-gate-up", "16", "--group-down", "8"]


def test_quantize(run: Run, tiny_dir: Path, tmp_path: Path):
    """Its JSON, and its tables."""
    target = tmp_path / "w4"
    done = run("quantize", tiny_dir, target, *GROUPS, "--json")
    saved = json.loads((target / "quant_report.json").read_text())
    assert done.code == 0 and done.json == {**saved, "destination": str(target)}
    assert saved["spec"] == {"group_gate_up": 16, "group_down": 8}
    done = run("quantize", tiny_dir, target, *GROUPS, "--overwrite")
    assert done.code == 0
    for tensor in saved["tensors"]:
        assert tensor["name"].removeprefix("model.decoder.") in done.out and f"{tensor['sqnr_db']:.2f}" in done.out
    assert "embedding" in done.out and "vision" in done.out
    sizes = f"{saved['bytes_before'] / 1e6:,.1f} MB -> {saved['bytes_after'] / 1e6:,.1f} MB"
    assert sizes in done.out.replace("\n", " ")


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["TINY", "w4"], 2, "group_gate_up 128 does not divide hidden_size 32"),
    (["TINY", "w4", "--group-down", "7"], 2, "group_down is 7, expected an even number"),
    (["absent", "w4"], 1, "no such directory"),
    (["TINY", "file/w4", *GROUPS], 1, "cannot be written (Not a directory)"),
    (["TINY", "file", *GROUPS], 2, "is a file"),
])  # fmt: skip
def test_quantize_errors_are_one_line(run: Run, tiny_dir, tmp_path, monkeypatch, arguments, code: int, message: str):
    (tmp_path / "file").write_text("x")
    monkeypatch.chdir(tmp_path)
    done = run("quantize", *(argument.replace("TINY", str(tiny_dir)) for argument in arguments))
    assert done.code == code and done.out == ""
    assert message in done.err and len(done.err.strip().splitlines()) == 1


def test_ctrl_c_says_how_to_resume(run: Run, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*args, progress, **kwargs):
        def stop(done: int, total: int) -> None:
            progress(done, total)
            if done == 2:
                raise KeyboardInterrupt

        return quantize(*args, progress=stop, **kwargs)

    command, target = ("quantize", tiny_dir, tmp_path / "w4", *GROUPS), tmp_path / "w4"
    with monkeypatch.context() as patch:
        patch.setattr("redraft.quant.quantize.quantize", interrupted)
        stopped = run(*command)
    assert stopped.code == 130 and f"interrupted, {target} was not written" in stopped.err
    assert str(partial_path(target)) in stopped.err
    assert not target.exists() and len(list(partial_path(target).glob("experts_*"))) == 2
    assert run(*command).code == 0
    assert not partial_path(target).exists()


def test_inspect_counts_every_parameter_once(run: Run, tiny_hf, tiny_dir: Path):
    result = run("inspect", tiny_dir, "--json").json
    parameters = sum(p.numel() for p in tiny_hf.parameters())  # transformers yields tied ones once
    scalars = sum(b.numel() for n, b in tiny_hf.named_buffers() if n.endswith("layer_scalar"))
    buffers = sum(t.numel() for n, t in load_file(tiny_dir / "model.safetensors").items() if "vision" in n)
    vision = sum(p.numel() for n, p in tiny_hf.named_parameters() if "vision" in n)
    assert result["total"]["parameters"] == parameters - vision + buffers + scalars
    assert result["total"]["bytes"] == 4 * result["total"]["parameters"]
    assert result["parts"]["experts"]["parameters"] == 3 * 8 * 3 * 32 * 16
    assert result["parts"]["embedding"]["parameters"] == 96 * 32
    assert result["format"] == "bf16" and result["shape"]["layers"] == 3
    assert result["spec"] is None and result["total"]["w4_bytes"] is None  # 128 does not divide 32
    assert any(note.startswith("no size in W4: group_gate_up 128 does not divide") for note in result["notes"])


def test_inspect_packed(run: Run, packed_dir: Path, monkeypatch: pytest.MonkeyPatch):
    done = run("inspect", packed_dir, "--verify", "--json")
    result, report = done.json, json.loads((packed_dir / "quant_report.json").read_text())
    assert done.code == 0
    assert result["format"] == "dg-w4a16-v1" and result["spec"] == {"group_gate_up": 16, "group_down": 8}
    assert result["total"]["bytes"] == result["total"]["w4_bytes"] == report["bytes_after"]
    assert result["parts"]["experts"]["parameters"] == 3 * 8 * 3 * 32 * 16
    assert all(row["bytes"]["bf16"] is None for row in result["fit"])
    monkeypatch.setenv("COLUMNS", "160")
    tables = run("inspect", packed_dir)
    assert tables.code == 0
    for text in ("dg-w4a16-v1", "36,864", "vision tensors", "8 GB", "W4"):
        assert text in tables.out


def test_inspect_verify_finds_damage(run: Run, packed_dir: Path, tmp_path: Path):
    damaged = Path(shutil.copytree(packed_dir, tmp_path / "w4"))
    flip(damaged / "experts_002.safetensors")
    assert run("inspect", damaged).code == 0
    done = run("inspect", damaged, "--verify")
    assert done.code == 1 and "experts_002.safetensors: tensor model.decoder.layers.2" in done.err


def test_inspect_errors(run: Run, tiny_dir: Path, tmp_path: Path):
    broken = Path(shutil.copytree(tiny_dir, tmp_path / "broken"))
    os.truncate(broken / "model.safetensors", 5000)
    for path in (broken, tmp_path / "absent"):
        done = run("inspect", path)
        assert done.code == 1 and len(done.err.strip().splitlines()) == 1 and "Traceback" not in done.err


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The real model's configuration and headers over a file of holes: 50 GB that take no space."""
    shapes = {
        "vocab_size": 262_144, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2,
        "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704, "sliding_window": 1024,
        "max_position_embeddings": 262_144,
    }  # fmt: skip
    config = tiny_config(256, **shapes)
    config.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    text.pop("per_layer_config", None)  # the spelling of the first release
    edit_json(tmp_path / "config.json", text_config={**text, "global_head_dim": 512, "num_global_key_value_heads": 2})
    with torch.device("meta"):
        state = DiffusionGemmaForBlockDiffusion._from_config(config).state_dict()
    header, end = {}, 0
    for name, tensor in state.items():
        if name == "lm_head.weight" or (".language_model." in name and "layer_scalar" not in name):
            continue  # tied
        size = 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(raw)) + raw)
    try:
        os.truncate(file, 8 + len(raw) + end)
    except OSError:
        pytest.skip("the file system has no sparse files of this size")
    return tmp_path


def test_inspect_the_published_shapes(run: Run, published: Path):
    """Figures that can be worked out by hand; nothing of 50 GB is loaded."""
    result = run("inspect", published, "--json").json
    experts = 30 * 128 * 3 * 704 * 2816
    assert result["parts"]["experts"]["parameters"] == experts == 22_837_985_280
    assert result["parts"]["embedding"]["parameters"] == 262_144 * 2816
    # 4 bits, and fp16 scale and zero per 128 (two thirds of the weights) or per 64 (one third)
    w4 = experts // 2 + 4 * (experts * 2 // 3 // 128 + experts // 3 // 64)
    assert result["parts"]["experts"]["w4_bytes"] == w4
    rows = {row["context"]: row for row in result["fit"]}
    # K and V in BF16: 5 full layers of 2 x 512 keep every row, 25 sliding ones of 8 x 256 keep 1023 + 256
    assert rows[131_072]["kv_bytes"] == 4 * (5 * 131_072 * 1024 + 25 * 1279 * 2048)
    assert rows[1024]["kv_bytes"] == 4 * (5 * 1024 * 1024 + 25 * 1024 * 2048)
    text = sum(p["parameters"] for n, p in result["parts"].items() if n not in ("vision", "experts"))
    kv = rows[8192]["kv_bytes"]
    assert rows[8192]["bytes"] == {"w4": 2 * text + w4 + kv, "bf16": 2 * (text + experts) + kv}
    assert rows[8192]["smallest_card_gb"] == {"w4": 24, "bf16": 80}
    assert 25.2e9 < text + experts < 25.4e9  # the model card's 25.3 B
