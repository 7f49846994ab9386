"""Whole fused passes on a GPU: the bundled model against the fp32 reference on a CPU, and the same bits every time."""

import pytest
import torch

import redraft
from redraft.config import DecodeSettings
from redraft.decode.entropy_bound import ENTROPY_BOUND
from redraft.engine.engine import Engine
from redraft.engine.graphs import GraphRunner
from redraft.engine.runner import admit_prompts
from redraft.evaluate.demo import TASKS
from redraft.network.arena import KVArena

# Never done before its last pass.
RULE = DecodeSettings(max_denoising_steps=1000, confidence_threshold=1e-30)


def _load(model: str, device: str) -> Engine:
    return redraft.load(model, weights="w4", tier="turbo", device=device)


@pytest.mark.gpu
def test_the_bundled_model_gives_the_logits_of_the_reference() -> None:
    """BF16 leaves argmax alone where the two best logits are not almost equal, and the GPU must not add to that.

    On a CPU, BF16 against fp32 differs in 0.5 % of these positions, in none whose two best are 0.05 apart; a BF16 step
    of the largest logits, near 30, is 0.125. Median relative errors of a pass are 0.6 % at most there.
    """
    cpu, gpu = _load("demo", "cpu"), _load("demo", "cuda")
    items = [item for task in TASKS.values() for item in task.items(8)]
    prompts = [cpu.encode_prompt(item.prompt) for item in items]
    config, length, slots = cpu.config, cpu.config.canvas_length, len(items)
    assert gpu.fused is not None
    runner = GraphRunner(gpu.fused, slots, max(map(len, prompts)) + length)
    admit_prompts(runner, prompts, ENTROPY_BOUND, RULE)
    runner.start(list(range(slots)))
    arenas = [KVArena(config, 1, len(prompt), torch.float32, cpu.device) for prompt in prompts]
    for prompt, arena in zip(prompts, arenas, strict=True):
        cpu.model.encode(torch.tensor([prompt]), arena)
    raw: list[torch.Tensor] = []
    work, table = runner.work.passes[slots], runner.work.lanes[slots].table
    sample = work.sample

    def keep_and_sample(*arguments: object) -> None:
        raw.append(work.logits.float().cpu().view(slots, length, -1))
        sample(*arguments)  # type: ignore[arg-type]

    work.sample = keep_and_sample  # type: ignore[method-assign]
    conditioning: list[torch.Tensor | None] = [None] * slots
    apart, equal = [], []
    for _ in range(3):
        canvases = runner.canvases.tokens.view(slots, 1, length).clone().cpu()
        temperature = float(runner.state.temperature[0])
        work.run(gpu.fused, table, runner.arena, runner.state, runner.canvases.tokens, runner.signal)
        own = runner.own(ENTROPY_BOUND)
        ENTROPY_BOUND.step(work.statistics, table, runner.state, own, runner.canvases)
        for slot in range(slots):
            expected = cpu.model.denoise(canvases[slot], arenas[slot], conditioning[slot])
            got = config.final_logit_softcap * torch.tanh(raw[-1][slot] / config.final_logit_softcap)
            assert float(((got - expected[0]).norm(dim=-1) / expected[0].norm(dim=-1)).median()) < 2e-2
            best = expected[0].topk(2, dim=-1)
            apart.append(best.values[:, 0] - best.values[:, 1])
            equal.append(raw[-1][slot].argmax(dim=-1) == best.indices[:, 0])
            conditioning[slot] = expected / temperature
    same, clear = torch.cat(equal).float(), torch.cat(apart) > 0.1
    assert same.mean() > 0.99 and clear.float().mean() > 0.9
    assert same[clear].mean() >= 0.999


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "lanes"), [("demo", 2), ("random:26b-a4b", 1), ("random:26b-a4b", 4)])
def test_hundreds_of_repetitions_of_a_pass_differ_in_no_bit(model: str, lanes: int) -> None:
    engine = _load(model, "cuda")
    assert engine.fused is not None
    runner, slots = GraphRunner(engine.fused, lanes, 400), list(range(lanes))
    admit_prompts(runner, [list(range(5, 5 + count)) for count in (300, 20, 100, 200)[:lanes]], ENTROPY_BOUND, RULE)
    runner.start(slots)
    runner.run_pass(slots)  # self-conditioning is in use from the second pass on
    places = [t for part in (runner.canvases, runner.state) for t in vars(part).values() if isinstance(t, torch.Tensor)]
    places += [runner.work.passes[lanes].logits, runner.signal]
    entropy = next(i for i, place in enumerate(places) if place is runner.canvases.entropy)
    before = [place.clone() for place in places]
    first: list[torch.Tensor] = []
    for _ in range(400):
        for place, old in zip(places, before, strict=True):
            place.copy_(old)
        runner.run_pass(slots)
        first = first or [place.clone() for place in places]
        assert all(torch.equal(place, kept) for place, kept in zip(places, first, strict=True))
    assert not torch.equal(first[entropy], before[entropy])
