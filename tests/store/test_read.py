"""Reading checkpoints: every spelling of the names, both formats, and every kind of damage."""

import copy
import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import edit_json, flip, published_layout, rewrite, tiny_config, tiny_tokenizer

import redraft.store.open as opening
import redraft.store.read as checkpoint
from redraft.config import ModelConfig, QuantSpec
from redraft.errors import CheckpointError, UsageError
from redraft.network.weights import DenseExperts, PackedExperts, iter_tensors, nbytes
from redraft.quant.load import load_checkpoint
from redraft.quant.quantize import quantize
from redraft.quant.rtn import quantize_experts
from redraft.store.bf16 import Bf16
from redraft.store.names import PARTS, canonical_name
from redraft.store.open import find_checkpoint, load_tokenizer
from redraft.store.read import Checkpoint, open_checkpoint

SPEC, INDEX = QuantSpec(16, 8), checkpoint.INDEX
KEPT = "model-00001-of-00001.safetensors"  # all but the experts of a packed directory
DEC, ENC = "model.decoder.", "model.encoder.language_model."
NO_HASHES = r"manifest\.json: file is missing, so there are no hashes"
Tensors = dict[str, torch.Tensor]
Damage = Callable[[Path], object]


@pytest.fixture
def broken(tiny_dir: Path, tmp_path: Path) -> Path:
    """A copy of the plain checkpoint to damage."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "model"))


@pytest.fixture
def broken_packed(packed_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed_dir, tmp_path / "packed"))


@pytest.fixture
def published(broken_packed: Path) -> Path:
    """A packed directory with no more than the format asks for."""
    published_layout(broken_packed)
    return broken_packed


@pytest.fixture
def sharded(tiny_hf, tmp_path: Path) -> Path:
    tiny_hf.save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def same_weights(a: Checkpoint, b: Checkpoint) -> bool:
    left, right = dict(iter_tensors(a.weights)), dict(iter_tensors(b.weights))
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


# What transformers calls a field of LayerWeights, spelled out here: a wrong table must not agree with itself.
HF_NAMES = {
    **{n: f"{n}.weight" for n in (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
        "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2",
    )},
    **{n: f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{n: f"mlp.{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")},
    "router_proj": "router.proj.weight", "router_scale": "router.scale",
    "per_expert_scale": "router.per_expert_scale", "experts.gate_up": "experts.gate_up_proj",
    "experts.down": "experts.down_proj", "decoder_scalar": "layer_scalar",
}  # fmt: skip


def test_every_weight_is_transformers_weight(tiny_dir: Path, tiny_hf):
    expected = {"embed": f"{DEC}embed_tokens.weight", "norm": f"{DEC}norm.weight"}
    for field in ("pre_norm", "gate_proj", "up_proj", "down_proj"):
        expected[f"self_conditioning.{field}"] = f"{DEC}self_conditioning.{field}.weight"
    for i in range(3):
        expected |= {f"layers.{i}.{field}": f"{DEC}layers.{i}.{name}" for field, name in HF_NAMES.items()}
        expected[f"layers.{i}.encoder_scalar"] = f"{ENC}layers.{i}.layer_scalar"
    del expected["layers.2.v_proj"]
    state, loaded = tiny_hf.state_dict(), load_checkpoint(tiny_dir, "bf16", torch.float32)
    assert loaded.format == "bf16" and loaded.spec is None
    found = dict(iter_tensors(loaded.weights))
    assert found.keys() == expected.keys() and loaded.weights.layers[2].v_proj is None
    for field, tensor in found.items():
        assert torch.equal(tensor, state[expected[field]]), field
    for layer in loaded.weights.layers:
        assert isinstance(layer.experts, DenseExperts) and layer.encoder_scalar != layer.decoder_scalar


def test_plain_weights_are_cast_and_packed_scales_are_not(tiny_dir: Path):
    for dtype in (torch.float32, torch.bfloat16):
        weights = load_checkpoint(tiny_dir, "w4", dtype, spec=SPEC).weights
        for name, tensor in iter_tensors(weights):
            if ".experts." in name:
                assert tensor.dtype == (torch.uint8 if name.endswith("_q") else torch.float16), name
            else:
                assert tensor.dtype == dtype, name
    dense = load_checkpoint(tiny_dir, "bf16", torch.bfloat16).weights
    assert {t.dtype for _, t in iter_tensors(dense)} == {torch.bfloat16}


@pytest.mark.parametrize("weights", ["w4", None])
def test_quantising_while_loading_equals_quantising_in_memory(tiny_dir: Path, tiny_hf, weights):
    state = tiny_hf.state_dict()
    loaded = load_checkpoint(tiny_dir, weights, spec=SPEC)
    assert loaded.spec == SPEC
    for i, layer in enumerate(loaded.weights.layers):
        names = (f"{DEC}layers.{i}.experts.gate_up_proj", f"{DEC}layers.{i}.experts.down_proj")
        assert isinstance(layer.experts, PackedExperts)
        expected = vars(quantize_experts(*(state[n] for n in names), SPEC))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in vars(layer.experts).items()), i


def test_packed_directory_equals_packing_at_load(tiny_dir: Path, packed_dir: Path):
    stored = load_checkpoint(packed_dir)
    assert stored.format == "dg-w4a16-v1" and stored.spec == SPEC
    assert same_weights(stored, load_checkpoint(tiny_dir, "w4", spec=SPEC))


def test_progress_counts_layers(tiny_dir: Path):
    calls: list[tuple[int, int]] = []
    load_checkpoint(tiny_dir, "bf16", progress=lambda *call: calls.append(call))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_sharded_equals_single(tiny_dir: Path, sharded: Path):
    assert len(list(sharded.glob("model-*.safetensors"))) > 2 and not (sharded / "model.safetensors").exists()
    assert same_weights(load_checkpoint(sharded, "bf16"), load_checkpoint(tiny_dir, "bf16"))


def test_bf16_files(tiny_hf, tmp_path: Path):
    model = copy.deepcopy(tiny_hf).bfloat16()
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path, "bf16", torch.float32).weights
    assert torch.equal(loaded.embed, model.state_dict()[f"{DEC}embed_tokens.weight"].float())
    assert torch.equal(loaded.layers[0].experts.down, model.state_dict()[f"{DEC}layers.0.experts.down_proj"].float())


def to_encoder(tensors: Tensors) -> Tensors:
    """Store every tied text weight under the encoder's name."""
    own = ("self_conditioning", "layer_scalar")
    return {n if any(o in n for o in own) else n.replace(DEC, ENC): t for n, t in tensors.items()}


SPELLINGS: dict[str, Callable[[Tensors], Tensors]] = {
    "encoder names": to_encoder,
    "both sides": lambda t: {**t, **{n: v.clone() for n, v in to_encoder(t).items()}},
    "no model. prefix": lambda t: {n.removeprefix("model."): v for n, v in t.items()},
    "encoder names without prefix": lambda t: {n.removeprefix("model."): v for n, v in to_encoder(t).items()},
    "head instead of embedding": lambda t: {n.replace(f"{DEC}embed_tokens", "lm_head"): v for n, v in t.items()},
    "head and embedding": lambda t: {**t, "lm_head.weight": t[f"{DEC}embed_tokens.weight"].clone()},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_tied_names(tiny_dir: Path, broken: Path, spelling: str):
    rewrite(broken / "model.safetensors", SPELLINGS[spelling])
    loaded = load_checkpoint(broken, "bf16", torch.float32)
    assert same_weights(loaded, load_checkpoint(tiny_dir, "bf16", torch.float32))
    assert loaded.notes == load_checkpoint(tiny_dir, "bf16").notes


@pytest.mark.parametrize(
    "name", [f"{ENC}layers.1.self_attn.q_proj.weight", f"{ENC}layers.2.experts.down_proj", "lm_head.weight"]
)
def test_tied_copies_that_differ_are_refused(broken: Path, name: str):
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[canonical_name(name)].clone()
        tensors[name].view(-1)[7] += 1

    rewrite(broken / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {name} differs from model\.decoder"):
        load_checkpoint(broken, "bf16")


@pytest.mark.parametrize(("name", "canonical"), [
    ("anything.at.all.layers.007.experts.gu_q", f"{DEC}layers.7.experts.gu_q"),
    ("layers.3.experts.dn_z", f"{DEC}layers.3.experts.dn_z"),
    (f"{ENC}layers.3.layer_scalar", f"{ENC}layers.3.layer_scalar"),
    ("encoder.vision_tower.x", "model.encoder.vision_tower.x"),
    ("something.else", "something.else"),
])  # fmt: skip
def test_canonical_names(name: str, canonical: str):
    assert canonical_name(name) == canonical


def test_parts_cover_the_network(tiny_dir: Path):
    files = open_checkpoint(tiny_dir)
    parts = {part: len(infos) for part, infos in files.parts.items()}
    assert list(parts) == [part for part in PARTS if part != "other"]
    assert parts.pop("vision") == len(files.extras) > 0
    # per layer: 4 projections (3 on the full one), 7 + 2 norms and 2 scalars, 3 MLP, 3 router, 2 experts; 1 final norm
    assert parts == {
        "embedding": 1, "attention": 11, "norms": 34, "dense MLP": 9, "router": 9, "experts": 6, "self-conditioning": 4
    }  # fmt: skip


def test_what_is_left_out_is_said(broken: Path):
    vision = [n for n in load_file(broken / "model.safetensors") if "vision" in n]
    rewrite(broken / "model.safetensors", lambda t: {**t, **{f"model.audio.{i}": torch.zeros(2) for i in range(4)}})
    assert load_checkpoint(broken, "bf16").notes == [
        f"{len(vision)} vision tensors (embed_vision, vision_tower) recognised and left out: text only for now",
        "4 unknown tensors left out: model.audio.0, model.audio.1, model.audio.2, ...",
    ]


def test_settings_come_from_generation_config(broken: Path):
    edit_json(broken / "generation_config.json", t_min=0.3, sampler_config={"entropy_bound": 0.25}, eos_token_id=[1, 5])
    loaded = load_checkpoint(broken, "bf16")
    assert (loaded.settings.t_min, loaded.settings.entropy_bound, loaded.settings.eos_token_ids) == (0.3, 0.25, (1, 5))
    (broken / "generation_config.json").unlink()
    loaded = load_checkpoint(broken, "bf16")
    assert loaded.settings.t_min == 0.4
    assert any(note.startswith("generation_config.json is missing") for note in loaded.notes)


def put(name: str, tensor: torch.Tensor, file: str = "model.safetensors") -> Damage:
    """A tensor in the place of another, or one too many."""
    return lambda path: rewrite(path / file, lambda t: {**t, name: tensor})


def drop(name: str, file: str = "model.safetensors") -> Damage:
    return lambda path: rewrite(path / file, lambda t: {n: v for n, v in t.items() if n != name})


def text(file: str, content: str) -> Damage:
    return lambda path: (path / file).write_text(content)


def keys(file: str, **changes: object) -> Damage:
    return lambda path: edit_json(path / file, **changes)


def without(*files: str) -> Damage:
    return lambda path: [(path / file).unlink() for file in files]


def cut(size: float) -> Damage:
    """The weights cut to so many bytes, or below 1 to such a share."""
    file = "model.safetensors"
    return lambda path: os.truncate(path / file, int(size * (path / file).stat().st_size) if 0 < size < 1 else size)


def both(*damages: Damage) -> Damage:
    return lambda path: [damage(path) for damage in damages]


def wrong(name: str, tensor: torch.Tensor, message: str, file: str = "model.safetensors") -> tuple[Damage, str]:
    return put(name, tensor, file), rf"PATH/{file}: tensor {name} .*{message}"


def expert(name: str, tensor: torch.Tensor, message: str) -> tuple[Damage, str]:
    return wrong(f"{DEC}layers.1.experts.{name}", tensor, message, "experts_001.safetensors")


def exchanged(path: Path) -> None:
    """A manifest that knows another dtype of a tensor."""
    tensors = json.loads((path / "manifest.json").read_text())["tensors"]
    tensors[f"{DEC}norm.weight"]["dtype"] = "BF16"
    edit_json(path / "manifest.json", tensors=tensors)


PLAIN: list[tuple[Damage, str]] = [
    *((drop(name), f"PATH: tensor {name} is missing") for name in (
        f"{DEC}embed_tokens.weight", f"{DEC}layers.1.router.per_expert_scale", f"{DEC}layers.2.layer_scalar",
        f"{ENC}layers.0.layer_scalar", f"{DEC}self_conditioning.pre_norm.weight", f"{DEC}layers.1.experts.down_proj",
    )),
    wrong(f"{DEC}norm.weight", torch.zeros(31), r"has shape \[31\], expected \[32\]"),
    wrong(f"{DEC}layers.0.self_attn.k_proj.weight", torch.zeros(32, 16), r"shape \[32, 16\], expected \[16, 32\]"),
    wrong(f"{DEC}layers.2.self_attn.q_proj.weight", torch.zeros(32, 32), r"shape \[32, 32\], expected \[64, 32\]"),
    wrong(f"{DEC}layers.0.experts.gate_up_proj", torch.zeros(8, 16, 32), r"expected \[8, 32, 32\]"),
    wrong(f"{DEC}layers.0.layer_scalar", torch.zeros(()), r"shape \[\], expected \[1\]"),
    wrong(f"{DEC}norm.weight", torch.zeros(32, dtype=torch.int8), "has dtype I8, expected BF16 or F16 or F32"),
    wrong(f"{DEC}norm.weight", torch.zeros(32).to(torch.float8_e4m3fn), "has dtype F8_E4M3, expected"),
    wrong(f"{ENC}norm.weight", torch.zeros(31), r"has shape \[31\], expected \[32\]"),
    wrong(f"{DEC}layers.3.norm.weight", torch.zeros(32), "belongs to no layer of the network"),
    wrong(f"{DEC}layers.2.self_attn.v_proj.weight", torch.zeros(16, 32), "belongs to no layer of the network"),
    wrong(f"{DEC}layers.0.experts.0.gate_proj.weight", torch.zeros(2), "belongs to no layer of the network"),
    *((cut(share), r"PATH/model\.safetensors: cut short within tensor model\.\S+: ") for share in (0.999, 0.7, 0.5)),
    *((cut(n), r"model\.safetensors: damaged, its header cannot be read") for n in (0, 1, 7, 8, 9, 100)),
    (both(without("model.safetensors"), text("pytorch_model.bin", "cos\nsystem\n(S'exit 1'\ntR.")),
     r"pytorch_model\.bin: pickled weights can run code.*save_pretrained"),
    (without("config.json"), r"PATH/config\.json: file is missing"),
    (without("model.safetensors"), "this is not a checkpoint directory"),
    (keys("config.json", model_type="gemma4"), r"config\.json: model_type is 'gemma4'"),
    (keys("config.json", quantization_config={"quant_method": "gptq"}), r"config\.json: quantised with 'gptq'"),
    (keys("config.json", text_config=None), r"config\.json: text_config is missing"),
    (text("config.json", '{"model_type": '), r"config\.json: cannot be read as JSON"),
    (keys("config.json", quantization_config={"quant_method": "dg-w4a16-v1"}),
     rf"PATH: tensor {DEC}layers.0.experts.gu_s is missing"),
]  # fmt: skip
SHARDED = [(damage, rf"{INDEX}: .*{message}") for damage, message in (
    (text(INDEX, "{"), "cannot be read as JSON"),
    (text(INDEX, "[]"), "expected a JSON object"),
    (text(INDEX, "{}"), "weight_map is missing"),
    (text(INDEX, '{"weight_map": {}}'), "weight_map is missing or empty"),
    (text(INDEX, '{"weight_map": {"a": 3}}'), "tensor a is said to be in 3"),
    (text(INDEX, '{"weight_map": {"a": "../elsewhere.safetensors"}}'), "expected a file name"),
    (without(INDEX), "file is missing"),
)]  # fmt: skip
PACKED: list[tuple[Damage, str]] = [
    (keys("w4_meta.json", group_down=16), r"w4_meta\.json: group_down is 16, but .* means 8"),
    (keys("config.json", quantization_config={"quant_method": "dg-w4a16-v1", "group_gate_up": 32}),
     r"config\.json: group_gate_up is 32, but .* means 16"),
    (keys("w4_meta.json", format="dg-w4a16-v2"),
     r"w4_meta\.json: format dg-w4a16-v2 is not the dg-w4a16-v1 this Redraft reads; upgrade Redraft"),
    (keys("w4_meta.json", format="gguf"), r"w4_meta\.json: format is 'gguf', expected 'dg-w4a16-v1'"),
    (keys("w4_meta.json", format=None), r"w4_meta\.json: format is None, expected"),
    (keys("w4_meta.json", format=["dg-w4a16-v1"]), r"w4_meta\.json: format is"),
    (both(published_layout, without("w4_meta.json")), r"w4_meta\.json: file is missing"),
    *((without(f"experts_00{i}.safetensors"), rf"experts_00{i}\.safetensors: shard is missing") for i in (0, 2)),
    *((both(without(f"experts_00{i}.safetensors"), published_layout),
       rf"experts_00{i}\.safetensors: tensor {DEC}layers\.{i}\.experts\.gu_\w is missing") for i in (0, 2)),
    expert("gu_q", torch.zeros(8, 32, 16, dtype=torch.int8), "has dtype I8, expected U8"),
    expert("dn_s", torch.zeros(8, 32, 2), "has dtype F32, expected F16"),
    expert("gu_z", torch.zeros(8, 32, 4).half(), r"has shape \[8, 32, 4\], expected \[8, 32, 2\]"),
    expert("dn_q", torch.zeros(8, 32, 16, dtype=torch.uint8), r"has shape \[8, 32, 16\], expected \[8, 32, 8\]"),
    *((put(f"{DEC}layers.0.experts.gu_s", torch.zeros(shape).half(), "experts_000.safetensors"), groups)
      for shape, groups in (((8, 32, 3), "gu_s"), ((8, 32), "gu_s"), ((8, 32, 32), "gu_s|group_gate_up"))),
    (put(f"{DEC}layers.0.experts.down_proj", torch.zeros(8, 32, 16), KEPT), r"experts\.down_proj belongs to no layer"),
    (put("extra", torch.zeros(8), "experts_002.safetensors"),
     r"experts_002\.safetensors: has \d+ bytes, manifest\.json recorded"),
    (exchanged, rf"tensor {DEC}norm\.weight differs from what manifest\.json"),
    *((text("manifest.json", content), r"manifest\.json") for content in (
        "{}", '{"files": [], "tensors": {}}', '{"files": {}, "tensors": {"a": 1}}'
    )),
]  # fmt: skip


@pytest.mark.parametrize(("directory", "damage", "message"), [
    *(("broken", *row) for row in PLAIN), *(("sharded", *row) for row in SHARDED),
    *(("broken_packed", *row) for row in PACKED),
])  # fmt: skip
def test_damage_is_found_before_weights_are_read(request, monkeypatch, directory: str, damage: Damage, message: str):
    path = request.getfixturevalue(directory)
    damage(path)
    monkeypatch.setattr(checkpoint, "read_tensor", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(CheckpointError, match=message.replace("PATH", re.escape(str(path)))):
        load_checkpoint(path, "bf16")


@pytest.fixture(scope="module")
def fuzzed(packed_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, bytes]]:
    path = Path(shutil.copytree(packed_dir, tmp_path_factory.mktemp("fuzz") / "model"))
    yield path, (path / "experts_001.safetensors").read_bytes()


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_anywhere_is_one_error_naming_the_file(fuzzed: tuple[Path, bytes], data: st.DataObject):
    """Any cut and any changed header byte: a CheckpointError with the file's name, or the very same tensors."""
    path, good = fuzzed
    header = 8 + int.from_bytes(good[:8], "little")
    if data.draw(st.booleans(), "cut"):
        bad = good[: data.draw(st.integers(0, len(good) - 1), "at")]
    else:
        at = data.draw(st.integers(0, header - 1), "at")
        bad = good[:at] + bytes([data.draw(st.integers(0, 255), "byte")]) + good[at + 1 :]
    (path / "experts_001.safetensors").write_bytes(bad)
    try:
        loaded = load_checkpoint(path)
    except CheckpointError as e:
        assert "experts_001.safetensors" in str(e)
    else:
        (path / "experts_001.safetensors").write_bytes(good)
        assert same_weights(loaded, load_checkpoint(path))


def test_missing_shard_names_file_and_tensor(sharded: Path):
    victim = sorted(sharded.glob("model-*.safetensors"))[1]
    held = load_file(victim)
    victim.unlink()
    message = rf"{victim}: shard is missing; it holds \S+ and {len(held) - 1} more"
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(sharded, "bf16")
    assert str(caught.value).split(" holds ")[1].split()[0] in held


def test_shard_without_a_promised_tensor(sharded: Path):
    victim = sorted(sharded.glob("model-*.safetensors"))[0]
    gone = sorted(load_file(victim))[0]
    drop(gone, victim.name)(sharded)
    with pytest.raises(CheckpointError, match=f"{victim}: tensor {gone} is missing, though"):
        load_checkpoint(sharded, "bf16")


@pytest.mark.parametrize(("directory", "options", "error", "message"), [
    ("tiny_dir", {}, UsageError, "group_gate_up 128 does not divide hidden_size 32"),
    ("tiny_dir", {"weights": "fp8"}, UsageError, "weights is 'fp8', expected one of w4, bf16"),
    ("packed_dir", {"weights": "bf16"}, CheckpointError, "holds 4-bit experts only.*weights='w4'"),
    ("packed_dir", {"spec": QuantSpec(32, 16)}, UsageError, "packed with .*quantise the BF16 checkpoint again"),
    ("tiny_dir", {"verify": True, "spec": SPEC}, CheckpointError, NO_HASHES),
    ("published", {"verify": True, "spec": SPEC}, CheckpointError, NO_HASHES),
])  # fmt: skip
def test_what_cannot_be_had_of_a_directory(request, monkeypatch, directory: str, options, error, message: str):
    path = request.getfixturevalue(directory)
    monkeypatch.setattr(checkpoint, "read_tensor", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(error, match=message):
        load_checkpoint(path, **options)


def test_weights_do_not_follow_the_file(broken: Path):
    loaded = load_checkpoint(broken, "bf16", torch.float32)
    before = [t.clone() for _, t in iter_tensors(loaded.weights)]
    with (broken / "model.safetensors").open("r+b") as f:
        f.write(b"\0" * os.fstat(f.fileno()).st_size)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, iter_tensors(loaded.weights), strict=True))


def others_layout(path: Path) -> None:
    """A minimal directory of another writer."""
    published_layout(path)
    for i in range(3):
        file = path / f"experts_{i:03d}.safetensors"
        rewrite(file, lambda t: {n.replace(DEC, ENC): v for n, v in t.items()})
        file.rename(path / f"experts_{2 - i}_of_3.safetensors")  # names of files carry no meaning


def one_shard_per_side(path: Path) -> None:
    (path / "manifest.json").unlink()
    for i in range(3):
        tensors = load_file(path / f"experts_{i:03d}.safetensors")
        twins = {n.replace(DEC, ENC): v for n, v in tensors.items()}
        save_file(twins, path / f"experts_{i + 3:03d}.safetensors")


class TestPacked:
    """Directories in dg-w4a16-v1, by this writer and by others."""

    @pytest.mark.parametrize("change", [others_layout, one_shard_per_side, without("w4_meta.json", "manifest.json")])
    def test_the_same_weights(self, packed_dir: Path, broken_packed: Path, change: Damage):
        """Without meta and manifest: what the hub's client fetches for transformers, which asks for the index's."""
        change(broken_packed)
        assert same_weights(load_checkpoint(broken_packed), load_checkpoint(packed_dir))
        assert load_checkpoint(broken_packed, spec=SPEC).spec == SPEC

    def test_groups_come_from_shapes(self, tiny_dir: Path, tmp_path: Path):
        quantize(tiny_dir, tmp_path / "w4", QuantSpec(8, 4))
        text("w4_meta.json", '{"format": "dg-w4a16-v1"}')(tmp_path / "w4")
        loaded = load_checkpoint(tmp_path / "w4")
        assert loaded.spec == QuantSpec(8, 4)
        assert loaded.weights.layers[0].experts.gu_s.shape == (8, 32, 4)


class TestManifest:
    def test_changed_bytes_are_found_by_hashes_only(self, broken_packed: Path):
        file = broken_packed / "experts_001.safetensors"
        flip(file)
        load_checkpoint(broken_packed)
        with pytest.raises(CheckpointError, match=rf"{file}: tensor {DEC}layers\.1\.experts\.\w+ has another sha256"):
            load_checkpoint(broken_packed, verify=True)

    def test_whole_directory_verifies(self, packed_dir: Path):
        assert same_weights(load_checkpoint(packed_dir, verify=True), load_checkpoint(packed_dir))

    def test_edited_settings_are_allowed_until_verified(self, broken_packed: Path):
        edit_json(broken_packed / "generation_config.json", t_min=0.2)
        assert load_checkpoint(broken_packed).settings.t_min == 0.2
        with pytest.raises(CheckpointError, match=r"generation_config\.json: changed, damaged or missing"):
            load_checkpoint(broken_packed, verify=True)


class TestFind:
    def test_directory_and_user_home(self, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch):
        assert find_checkpoint(tiny_dir) == find_checkpoint(str(tiny_dir)) == tiny_dir
        monkeypatch.setenv("HOME", str(tiny_dir.parent))
        assert find_checkpoint(f"~/{tiny_dir.name}") == tiny_dir

    def test_demo(self, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(opening, "DEMO", tiny_dir)
        assert find_checkpoint("demo") == tiny_dir
        monkeypatch.setattr(opening, "DEMO", tiny_dir / "absent")
        with pytest.raises(CheckpointError, match="bundled checkpoint is missing"):
            find_checkpoint("demo")

    @pytest.mark.parametrize("name", ["no-such-model", "./a/b", "/a/b/c", "../b", "a/b/c", ""])
    def test_neither_path_nor_hub_id(self, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
        monkeypatch.chdir(tmp_path)
        with pytest.raises(CheckpointError, match=r"no such directory|config\.json"):
            open_checkpoint(find_checkpoint(name))

    def test_file_instead_of_directory(self, tiny_dir: Path):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: is a file, expected a checkpoint directory"):
            find_checkpoint(tiny_dir / "model.safetensors")

    def test_hub_id_is_downloaded_without_pickles(self, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch):
        asked = {}

        def download(repo: str, allow_patterns: list[str]) -> str:
            asked[repo] = allow_patterns
            return str(tiny_dir)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        assert find_checkpoint("some-org/a.model-1") == tiny_dir
        assert not any(p.endswith((".bin", ".pt", "*")) for p in asked["some-org/a.model-1"])

    def test_failed_download_is_one_line(self, monkeypatch: pytest.MonkeyPatch):
        from huggingface_hub.errors import LocalEntryNotFoundError

        def download(*_: object, **__: object) -> str:
            raise LocalEntryNotFoundError("\nCannot find the files; outgoing traffic has been disabled.\nMore\n")

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        with pytest.raises(CheckpointError) as caught:
            find_checkpoint("org/name")
        assert str(caught.value).startswith("org/name: no such directory here, and the hub download failed")
        assert "outgoing traffic has been disabled." in str(caught.value) and "\n" not in str(caught.value)


class TestTokenizer:
    def test_round_trip(self, tmp_path: Path):
        tiny_tokenizer().save_pretrained(tmp_path)
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.encode("ab") == tiny_tokenizer().encode("ab") and tokenizer.chat_template

    def test_missing_and_damaged(self, broken: Path):
        (broken / "tokenizer.json").unlink()
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: file is missing"):
            load_tokenizer(broken)
        tiny_tokenizer().save_pretrained(broken)
        (broken / "tokenizer.json").write_text('{"version": 1')
        with pytest.raises(CheckpointError, match=f"{broken}: the tokenizer cannot be loaded"):
            load_tokenizer(broken)


# Each load runs in a child of its own, forked after the imports, so that no heap of an earlier one hides a peak.
MEASURE = textwrap.dedent(
    """
    import ctypes, os, sys, torch
    from redraft.quant.load import load_checkpoint
    from redraft.config import QuantSpec
    from redraft.network.weights import nbytes

    def status(key):
        line = next(l for l in open("/proc/self/status") if l.startswith(key))
        return int(line.split()[1]) * 1024

    torch.set_num_threads(1)
    warm, *cases = sys.argv[1:]
    for case in cases:
        weights, path = case.split(":")
        if os.fork() == 0:
            load_checkpoint(warm, spec=QuantSpec(16, 8))  # brings in the libraries' pages
            ctypes.CDLL(None).malloc_trim(0)  # free heap counts as resident, and would hide as much of the peak
            open("/proc/self/clear_refs", "w").write("5")  # restart the high-water mark
            before = status("VmRSS")
            loaded = load_checkpoint(path, weights)
            print(status("VmHWM") - before, nbytes(loaded.weights), flush=True)
            os._exit(0)
        os.wait()
    """
)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's high-water mark")
def test_peak_memory_of_loading(tiny_dir: Path, tmp_path: Path):
    """Peak <= result + one layer of BF16 experts, packed or quantised on the fly; the meter itself is checked too."""
    layers, experts, hidden, inner = 8, 8, 256, 512
    one_layer = 2 * experts * 3 * hidden * inner
    kinds = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    sizes = {"num_experts": experts, "hidden_size": hidden, "moe_intermediate_size": inner}
    tiny_config(num_hidden_layers=layers, layer_types=kinds, **sizes).save_pretrained(tmp_path / "bf16")
    expected = Bf16().tensors(ModelConfig.from_dict(json.loads((tmp_path / "bf16" / "config.json").read_text())))
    values = torch.randn(1 << 16).bfloat16()
    tensors = {name: values.repeat(math.prod(shape) // len(values) + 1) for name, (_, shape) in expected.items()}
    tensors = {name: t[: math.prod(expected[name][1])].view(expected[name][1]) for name, t in tensors.items()}
    save_file(tensors, tmp_path / "bf16" / "model.safetensors")
    quantize(tmp_path / "bf16", tmp_path / "w4")

    cases = [f"w4:{tmp_path / 'w4'}", f"w4:{tmp_path / 'bf16'}", f"bf16:{tmp_path / 'bf16'}"]
    command = [sys.executable, "-c", MEASURE, str(tiny_dir), *cases]
    # Each tensor a mapping of its own, which the system has back when it is freed: by default glibc takes larger and
    # larger ones from its heap, and what that keeps depends on how it happens to be laid out.
    own_mappings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=own_mappings).stdout
    *packed, (dense_peak, dense) = (tuple(map(int, line.split())) for line in out.splitlines())
    slack = 4 << 20  # fp32 copies of one expert, small tensors, the interpreter
    assert dense > layers * one_layer and dense_peak > 0.9 * dense, "the meter does not see what it should"
    for case, (peak, result) in zip(cases, packed, strict=False):
        assert result + one_layer + slack < dense - one_layer, "the model is too small to tell"
        assert peak <= result + one_layer + slack, (case, peak / 2**20, result / 2**20)


def test_packed_bytes_are_what_the_format_says(packed_dir: Path):
    weights = load_checkpoint(packed_dir).weights
    per_layer = 8 * (32 * 16 + 2 * 2 * 32 * 2) + 8 * (32 * 8 + 2 * 2 * 32 * 2)
    assert nbytes(weights.layers[0].experts) == per_layer
