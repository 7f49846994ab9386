"""`redraft quantize` and `redraft inspect`, from the command line."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_config

from redraft.cli import main
from redraft.quant.quantize import quantize
from redraft.store.workdir import partial_path

GROUPS = ["--group-gate-up", "16", "--group-down", "8"]


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_quantize_and_json(tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["quantize", str(tiny_dir), str(tmp_path / "w4"), *GROUPS, "--json"]) == 0
    result = last_json(capsys)
    saved = json.loads((tmp_path / "w4" / "quant_report.json").read_text())
    assert result == {**saved, "destination": str(tmp_path / "w4")}
    assert saved["spec"] == {"group_gate_up": 16, "group_down": 8}


def test_quantize_tables(tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["quantize", str(tiny_dir), str(tmp_path / "w4"), *GROUPS]) == 0
    out = capsys.readouterr().out
    saved = json.loads((tmp_path / "w4" / "quant_report.json").read_text())
    for tensor in saved["tensors"]:
        assert tensor["name"].removeprefix("model.decoder.") in out and f"{tensor['sqnr_db']:.2f}" in out
    assert "embedding" in out and "vision" in out
    assert f"{saved['bytes_before'] / 1e6:,.1f} MB -> {saved['bytes_after'] / 1e6:,.1f} MB" in out.replace("\n", " ")


def test_quantize_errors_are_one_line(tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("x")
    for arguments, code, message in (
        ([str(tiny_dir), str(tmp_path / "w4")], 2, "group_gate_up 128 does not divide hidden_size 32"),
        ([str(tiny_dir), str(tmp_path / "w4"), "--group-down", "7"], 2, "group_down is 7, expected an even number"),
        ([str(tmp_path / "absent"), str(tmp_path / "w4")], 1, "no such directory"),
        ([str(tiny_dir), str(tmp_path / "file" / "w4"), *GROUPS], 1, "cannot be written (Not a directory)"),
        ([str(tiny_dir), str(tmp_path / "file"), *GROUPS], 2, "is a file"),
    ):
        assert main(["quantize", *arguments]) == code
        captured = capsys.readouterr()
        assert message in captured.err and len(captured.err.strip().splitlines()) == 1 and captured.out == ""


def test_ctrl_c_says_how_to_resume(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*args, progress, **kwargs):
        def stop(done: int, total: int) -> None:
            progress(done, total)
            if done == 2:
                raise KeyboardInterrupt

        return quantize(*args, progress=stop, **kwargs)

    monkeypatch.setattr("redraft.quant.quantize.quantize", interrupted)
    target = tmp_path / "w4"
    assert main(["quantize", str(tiny_dir), str(target), *GROUPS]) == 130
    error = capsys.readouterr().err
    assert f"interrupted, {target} was not written" in error and str(partial_path(target)) in error
    assert not target.exists() and len(list(partial_path(target).glob("experts_*"))) == 2
    monkeypatch.undo()
    assert main(["quantize", str(tiny_dir), str(target), *GROUPS]) == 0
    assert not partial_path(target).exists()


def test_inspect_counts_every_parameter_once(tiny_hf, tiny_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(tiny_dir), "--json"]) == 0
    result = last_json(capsys)
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


def test_inspect_packed(tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["quantize", str(tiny_dir), str(tmp_path / "w4"), *GROUPS, "--json"])
    report = last_json(capsys)
    assert main(["inspect", str(tmp_path / "w4"), "--verify", "--json"]) == 0
    result = last_json(capsys)
    assert result["format"] == "dg-w4a16-v1" and result["spec"] == {"group_gate_up": 16, "group_down": 8}
    assert result["total"]["bytes"] == result["total"]["w4_bytes"] == report["bytes_after"]
    assert result["parts"]["experts"]["parameters"] == 3 * 8 * 3 * 32 * 16
    assert all(row["bytes"]["bf16"] is None for row in result["fit"])


def test_inspect_verify_finds_damage(tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["quantize", str(tiny_dir), str(tmp_path / "w4"), *GROUPS])
    with (tmp_path / "w4" / "experts_002.safetensors").open("r+b") as f:
        f.seek(-1, os.SEEK_END)
        f.write(b"\xff")
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "w4")]) == 0
    assert main(["inspect", str(tmp_path / "w4"), "--verify"]) == 1
    assert "experts_002.safetensors: tensor model.decoder.layers.2" in capsys.readouterr().err


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
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["text_config"].pop("per_layer_config", None)  # the spelling of the first release
    raw["text_config"].update(global_head_dim=512, num_global_key_value_heads=2)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    from transformers import DiffusionGemmaForBlockDiffusion

    with torch.device("meta"):
        state = DiffusionGemmaForBlockDiffusion._from_config(config).state_dict()
    header, end = {}, 0
    for name, tensor in state.items():
        if (
            name.startswith("model.encoder.language_model.") and "layer_scalar" not in name
        ) or name == "lm_head.weight":
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


def test_inspect_the_published_shapes(published: Path, capsys: pytest.CaptureFixture[str]):
    """Figures that can be worked out by hand; nothing of 50 GB is loaded."""
    assert main(["inspect", str(published), "--json"]) == 0
    result = last_json(capsys)
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
    assert rows[8192]["bytes"] == {
        "w4": 2 * text + w4 + rows[8192]["kv_bytes"],
        "bf16": 2 * (text + experts) + rows[8192]["kv_bytes"],
    }
    assert rows[8192]["smallest_card_gb"] == {"w4": 24, "bf16": 80}
    assert 25.2e9 < text + experts < 25.4e9  # the model card's 25.3 B


def test_inspect_tables(tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    main(["quantize", str(tiny_dir), str(tmp_path / "w4"), *GROUPS])
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "w4")]) == 0
    out = capsys.readouterr().out
    assert "dg-w4a16-v1" in out and "36,864" in out and "vision tensors" in out
    assert "8 GB" in out and "W4" in out


def test_inspect_errors(tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    broken = Path(shutil.copytree(tiny_dir, tmp_path / "broken"))
    os.truncate(broken / "model.safetensors", 5000)
    for path in (broken, tmp_path / "absent"):
        assert main(["inspect", str(path)]) == 1
        captured = capsys.readouterr()
        assert len(captured.err.strip().splitlines()) == 1 and "Traceback" not in captured.err
