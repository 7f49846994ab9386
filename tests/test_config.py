"""Settings are read from both spellings of config.json and refused with a reason."""

import copy

import pytest
from tiny import tiny_config

from redraft.config import DecodeSettings, ModelConfig, QuantSpec, check_seed, read_json
from redraft.errors import CheckpointError, UsageError


@pytest.fixture
def raw() -> dict:
    return copy.deepcopy(tiny_config().to_dict())


def test_model_config_values(raw):
    config = ModelConfig.from_dict(raw)
    assert (config.num_layers, config.num_experts, config.top_k_experts, config.canvas_length) == (3, 8, 2, 8)
    sliding, _, full = config.layers
    assert (sliding.kind, sliding.head_dim, sliding.num_kv_heads, sliding.rope_theta) == ("sliding", 8, 2, 1e4)
    assert (full.kind, full.head_dim, full.num_kv_heads, full.rope_theta) == ("full", 16, 1, 1e6)
    assert (sliding.partial_rotary_factor, full.partial_rotary_factor) == (1.0, 0.25)
    assert config.final_logit_softcap == 30.0


def test_older_spelling_of_full_layers(raw):
    """transformers before per_layer_config wrote global_head_dim and num_global_key_value_heads."""
    new = ModelConfig.from_dict(raw)
    raw["text_config"].pop("per_layer_config", None)
    raw["text_config"] |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    assert ModelConfig.from_dict(raw) == new


def test_layer_numbers_padded_with_zeros(tmp_path):
    """transformers writes "05" for layer 5 of a model of ten or more layers."""
    tiny_config(num_hidden_layers=12, layer_types=None).save_pretrained(tmp_path)
    config = ModelConfig.from_dict(read_json(tmp_path / "config.json"))
    assert [i for i, layer in enumerate(config.layers) if layer.kind == "full"] == [5, 11]
    assert [layer.head_dim for layer in config.layers] == [16 if i in (5, 11) else 8 for i in range(12)]


def test_unreadable_json_is_one_error(tmp_path):
    path = tmp_path / "config.json"
    for content in (b"{", b"[1]", b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="config"):
            read_json(path)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model_type", "llama", "model_type is 'llama'"),
        ("text_config", None, "text_config is missing"),
        ("tie_word_embeddings", False, "tie_word_embeddings"),
        ("text_config.hidden_size", None, "hidden_size"),
        ("text_config.hidden_size", -4, "hidden_size is -4"),
        ("text_config.hidden_activation", "silu", "hidden_activation is 'silu'"),
        ("text_config.use_bidirectional_attention", "all", "use_bidirectional_attention"),
        ("text_config.layer_types", ["sliding_attention"], "layer_types names 1 layers"),
        ("text_config.layer_types", ["linear", "full_attention", "full_attention"], "layer_types[0] is 'linear'"),
        ("text_config.top_k_experts", 9, "top_k_experts is 9"),
        ("text_config.num_key_value_heads", 3, "do not share 3 KV heads"),
        ("text_config.rope_parameters", {"full_attention": {"rope_type": "yarn"}}, "yarn"),
    ],
)
def test_bad_config_names_the_field(raw, path, value, message):
    section, _, field = path.rpartition(".")
    (raw[section] if section else raw)[field] = value
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dict(raw, "some/config.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("some/config.json: ")


def test_missing_field_is_named(raw):
    del raw["text_config"]["moe_intermediate_size"]
    with pytest.raises(CheckpointError, match=r"text_config\.moe_intermediate_size is missing"):
        ModelConfig.from_dict(raw)


def test_generation_config_is_read():
    read = DecodeSettings.from_generation_config(
        {"eos_token_id": [1, 106], "t_max": 0.9, "t_min": None, "sampler_config": {"entropy_bound": 0.3}}
    )
    assert (read.eos_token_ids, read.t_max, read.t_min, read.entropy_bound) == ((1, 106), 0.9, 0.4, 0.3)
    assert read.max_denoising_steps == 48
    assert DecodeSettings.from_generation_config({"eos_token_id": 5}).eos_token_ids == (5,)
    assert DecodeSettings.from_generation_config({}).eos_token_ids == ()
    assert DecodeSettings.from_generation_config({"eos_token_id": None}).eos_token_ids == ()
    with pytest.raises(CheckpointError, match=r"gen\.json: t_max"):
        DecodeSettings.from_generation_config({"t_max": -1.0}, "gen.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"max_new_tokens": 0}, {"max_new_tokens": 2.5}, {"max_new_tokens": True}, {"max_denoising_steps": 0},
        {"entropy_bound": 0.0}, {"entropy_bound": float("nan")}, {"entropy_bound": "0.1"}, {"t_min": 0.9},
        {"t_min": 0.0}, {"stability_threshold": -1}, {"confidence_threshold": float("inf")}, {"entropy": 0.1},
    ],
)  # fmt: skip
def test_bad_settings_are_refused_by_name(changes):
    with pytest.raises(UsageError) as caught:
        DecodeSettings().replace(**changes)
    assert next(iter(changes)) in str(caught.value) or "t_max" in str(caught.value)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True, "7"])
def test_bad_seeds_are_refused(seed):
    with pytest.raises(UsageError, match="seed is"):
        check_seed(seed)


def test_group_sizes_are_checked_with_the_numbers(raw):
    config = ModelConfig.from_dict(raw)
    QuantSpec(16, 8).check(config)
    with pytest.raises(UsageError, match=r"group_gate_up 128 does not divide hidden_size 32 \(remainder 32\)"):
        QuantSpec().check(config)
    with pytest.raises(UsageError, match="group_down is 3"):
        QuantSpec(16, 3)
