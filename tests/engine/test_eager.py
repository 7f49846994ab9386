"""Passes of several slots on a CPU: the bits of each are those it has alone."""

import pytest
import torch

from redraft.config import DecodeSettings
from redraft.decode.entropy_bound import ENTROPY_BOUND
from redraft.engine.eager import EagerRunner, Rows
from redraft.network.model import Model
from redraft.quant.load import load_checkpoint

SETTINGS = DecodeSettings(max_denoising_steps=50, stability_threshold=9, eos_token_ids=())
LENGTHS = (3, 13, 7, 12, 5, 16, 11, 1)  # of prompts: fewer rows than a tile, whole tiles, a tile and a rest
# What happens in turn, and to which slots: every width from 1 to 8, first passes among later ones, commits of one or
# several canvases, slots that wait, a slot that is given away.
SCRIPT = [
    ("join", "0"), ("pass", "0"), ("join", "1"), ("pass", "01"), ("join", "2"), ("pass", "012"), ("join", "34"),
    ("pass", "01234"), ("pass", "4321"), ("commit", "13"), ("pass", "01234"), ("join", "5"), ("pass", "012345"),
    ("join", "67"), ("pass", "1234567"), ("pass", "76543210"), ("commit", "0257"), ("pass", "0123456"), ("join", "4"),
    ("pass", "456"), ("commit", "6"), ("pass", "01234567"), ("pass", "6"),
]  # fmt: skip


def _play(model: Model, slots: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.Tensor]]:
    """Logits of each of these slots' passes when the script is played with them alone."""
    runner = EagerRunner(model, 8)
    logits: dict[str, list[torch.Tensor]] = {slot: [] for slot in slots}
    original = Rows.take

    def take(rows: Rows, own: torch.Tensor) -> None:
        logits[str(int(rows.stream._seeds[0]))].append(own.clone())
        original(rows, own)

    monkeypatch.setattr(Rows, "take", take)
    for what, which in SCRIPT:
        now = [int(slot) for slot in which if slot in slots]
        if what == "pass" and now:
            runner.run_pass(now)
            assert [status.slot for status in runner.poll()] == now
        elif now:
            pieces = {slot: [(5 * slot + i) % 90 + 3 for i in range(LENGTHS[slot])] for slot in now}
            if what == "commit":
                pieces = {slot: runner._rows[slot].canvases.argmax.tolist() for slot in now}
            else:
                for slot, prompt in pieces.items():
                    positions = len(prompt) + 2 * model.config.canvas_length
                    runner.admit(slot, slot, ENTROPY_BOUND, SETTINGS, slot, keep=False, positions=positions)
            runner.read(pieces)
            runner.start(now)
    monkeypatch.setattr(Rows, "take", original)
    return logits


@pytest.mark.parametrize("threads", [1, 2, 3])  # a third of the elements is no whole number of vectors
@pytest.mark.parametrize(
    ("name", "weights", "dtype"),
    [("demo", "w4", torch.float32), ("demo", "bf16", torch.bfloat16), ("random:tiny", "bf16", torch.float32)],
)
def test_a_slot_has_its_bits_in_any_company(name, weights, dtype, threads, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        checkpoint = load_checkpoint(name, weights, dtype, torch.device("cpu"))
        model = Model(checkpoint.config, checkpoint.weights)
        together = _play(model, "01234567", monkeypatch)
        for slot, passes in together.items():
            alone = _play(model, slot, monkeypatch)[slot]
            assert len(alone) == len(passes) >= 3
            for number, (one, other) in enumerate(zip(alone, passes, strict=True)):
                assert torch.equal(one, other), f"slot {slot}, pass {number}: {float((one - other).abs().max())}"
    finally:
        torch.set_num_threads(before)
