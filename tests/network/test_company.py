"""On a GPU a slot's logits have the same bits in passes of every width, whoever is in the other lanes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import redraft
from redraft.config import DecodeSettings
from redraft.decode.entropy_bound import ENTROPY_BOUND
from redraft.engine.graphs import GraphRunner
from redraft.engine.runner import read_whole
from redraft.network.fused import DenoisePass

# Never done before its last pass.
RULE = DecodeSettings(max_denoising_steps=1000, confidence_threshold=1e-30)
WIDTHS = (1, 4, 16)
PASSES = 3


def passes_beside(runner: GraphRunner, mine: list[int], width: int, seed: int) -> dict[str, torch.Tensor]:
    """A slot's logits, signal and canvas in two canvases, with the prompts of `width` - 1 others about it.

    All begin, pass and commit together; a prompt of more than a canvas is read alone, as the loop does.
    """
    slot, length = width // 2, runner.model.config.canvas_length
    generator = torch.Generator().manual_seed(seed)
    runner.reset()
    prompts = {s: _tokens(int(torch.randint(1, length, (1,), generator=generator)), seed + s) for s in range(width)}
    prompts[slot] = mine
    for s, prompt in prompts.items():
        positions = len(prompt) + 2 * length
        runner.admit(s, s, ENTROPY_BOUND, RULE, 7 if s == slot else seed + s, keep=False, positions=positions)
    if len(mine) > length:
        read_whole(runner, slot, prompts.pop(slot))
    if prompts:
        runner.read(prompts)
    lanes = list(range(width))
    seen: dict[str, torch.Tensor] = {}
    for canvas in range(2):
        runner.start(lanes)
        runner.work.lanes[width].set(lanes)
        for number in range(PASSES):
            raw, at = _pass(runner, width), slice(slot * length, (slot + 1) * length)
            seen[f"logits {canvas}.{number}"] = raw[at].clone()
            seen[f"signal {canvas}.{number}"] = runner.signal[at].clone()
            seen[f"canvas {canvas}.{number}"] = runner.canvases.tokens[at].clone()
        argmax = runner.canvases.argmax.view(runner.slots, length)
        runner.read({s: argmax[s].tolist() for s in lanes})
    return seen


def _pass(runner: GraphRunner, width: int) -> torch.Tensor:
    """The pass of a width, launch by launch; its raw logits, which sampling turns into probabilities."""
    work, table, raw, sample = runner.work.passes[width], runner.work.lanes[width].table, [], DenoisePass.sample

    def keep_and_sample(*arguments: object) -> None:
        raw.append(work.logits.clone())
        sample(*arguments)  # type: ignore[arg-type]

    with mock.patch.object(DenoisePass, "sample", keep_and_sample):
        work.run(runner.model, table, runner.arena, runner.state, runner.canvases.tokens, runner.signal)
    ENTROPY_BOUND.step(work.statistics, table, runner.state, runner.own(ENTROPY_BOUND), runner.canvases)
    return raw[0]


def _tokens(count: int, seed: int) -> list[int]:
    return torch.randint(5, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["w4", "bf16"])
@pytest.mark.parametrize("model", ["demo", "random:26b-a4b"])
def test_a_slot_gives_the_same_bits_in_any_company(model: str, weights: redraft.config.WeightFormat) -> None:
    engine = redraft.load(model, weights=weights, tier="turbo", device="cuda")
    assert engine.fused is not None
    length = engine.config.canvas_length
    runner = GraphRunner(engine.fused, max(WIDTHS), 1200 + 3 * length)
    for count in (20, length, 3 * length + 7, 1100):
        mine, alone = _tokens(count, 3), None
        for width in WIDTHS:
            for seed in (100, 200) if width > 1 else (100,):
                seen = passes_beside(runner, mine, width, seed)
                alone = alone or seen
                different = {name: int((seen[name] != alone[name]).sum()) for name in seen}
                assert not any(different.values()), (count, width, seed, different)
    runner.close()
    engine.close()
