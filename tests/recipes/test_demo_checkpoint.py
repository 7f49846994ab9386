"""The bundled checkpoint: small, complete, consistent with the task generators, and able to answer."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

import redraft.demo
from recipes.demo.measure import measure
from recipes.demo.train import DECODER_SCALARS, ENCODER_SCALARS
from redraft.evaluate.demo import TASKS

FOLDER = Path(redraft.demo.__file__).parent / "checkpoint"


def test_size_and_settings() -> None:
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) <= 26_000_000
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 4]
    assert generation["sampler_config"] == {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1}
    text = json.loads((FOLDER / "config.json").read_text())["text_config"]
    assert text["hidden_size"] % 128 == 0  # the published 4-bit groups divide both inner sizes
    assert text["moe_intermediate_size"] % 64 == 0


@pytest.mark.parametrize("name", TASKS)
def test_tokenizer_spells_every_answer(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    for item in TASKS[name].items(100):
        ids = tokenizer(item.expected)["input_ids"]
        assert tokenizer.decode(ids) == item.expected
        assert len(ids) < (128 if name == "stories" else 64)


def test_answers_with_the_official_sampler() -> None:
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(FOLDER, dtype=torch.float32)
    sides = model.model.encoder.language_model, model.model.decoder
    scalars = [tuple(float(layer.layer_scalar) for layer in side.layers) for side in sides]
    assert scalars == [ENCODER_SCALARS, DECODER_SCALARS]
    rows = measure(model, AutoTokenizer.from_pretrained(FOLDER), 6, ("arithmetic", "edit", "lists", "facts", "code"))
    right = {row["task"]: row["accuracy"] for row in rows}
    assert right["facts"] == 1 and min(right.values()) > 0.5
    assert sum(right.values()) / len(right) > 0.9
