"""Timing: medians, warm-up, interleaving."""

import time

import pytest
import torch

from redraft.bench.timing import LEAST_RUNS, WARM_UP, Timing, interleave, measure
from redraft.device import environment, peak_bytes

CPU = torch.device("cpu")


def test_median_and_the_outer_tenths() -> None:
    timing = Timing.of([5.0, 1.0, 2.0, 100.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    assert (timing.median, timing.low, timing.high, timing.runs) == (6.0, 2.0, 10.0, 11)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 1)


def test_calls_are_warmed_up_and_a_sequence_gives_their_mean() -> None:
    calls: list[str] = []
    timing = measure(lambda: (calls.append("a"), time.sleep(0.002)), CPU, seconds=0.0)
    assert timing.runs == LEAST_RUNS and not timing.graph
    assert calls == ["a"] * (WARM_UP + 1 + LEAST_RUNS)
    assert 2.0 <= timing.median < 20.0
    calls.clear()
    sequence = [lambda: (calls.append("a"), time.sleep(0.004)), lambda: calls.append("b")]
    timing = measure(sequence, CPU, seconds=0.0, graph=True)
    assert calls[:4] == ["a", "b", "a", "b"]
    assert 2.0 <= timing.median < 4.0
    assert not timing.graph  # there are none on a CPU


def test_arms_take_turns() -> None:
    order: list[str] = []
    arms = {name: lambda name=name, ms=ms: (order.append(name), ms)[1] for name, ms in (("a", 3.0), ("b", 1.0))}
    times = interleave(arms, 3)
    assert order == ["a", "b"] * 3
    assert (times["a"].median, times["b"].median) == (3.0, 1.0)


def test_what_a_figure_depends_on() -> None:
    about = environment(CPU)
    assert about["torch"] == torch.__version__ and about["threads"] == torch.get_num_threads()
    assert peak_bytes(CPU) > 10 << 20


@pytest.mark.gpu
def test_a_graph_is_replayed_without_its_launches() -> None:
    device = torch.device("cuda")
    x = torch.rand(1, device=device)
    calls = [lambda: x.add_(1)] * 200
    plain, graph = measure(calls, device), measure(calls, device, graph=True)
    assert graph.graph and graph.median < plain.median
