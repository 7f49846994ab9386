"""`redraft compare-ar`: diffusion against autoregressive decoding, on the same weights, prompts and device.

The encoder is a causal language model on the decoder's weights, so each prompt can also be answered one token a step.
All prompts are answered at every batch size by every arm, a batch at a time; the arms take turns at going first. Where
that makes fewer than LEAST_BATCHES batches, they are answered several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from redraft.bench.answer_work import Routes, autoregressive_work, diffusion_work
from redraft.bench.autoregressive import FusedGreedy, GreedyDecoder, ReferenceGreedy
from redraft.bench.batch import OUT_OF_MEMORY, release
from redraft.bench.probe import Probe
from redraft.bench.roofline import Measured, Roofline, Work, save_figure
from redraft.bench.timing import Timing, percentile, wall_ms
from redraft.bench.work import Shapes
from redraft.config import DecodeSettings
from redraft.engine.events import count_tokens
from redraft.engine.graphs import GraphRunner
from redraft.errors import MemoryShortage

if TYPE_CHECKING:
    from redraft.engine.engine import Engine

AUTOREGRESSIVE = "autoregressive"
OWN_STOP = "diffusion, own stop"
LEAST_BATCHES = 3


@dataclass(frozen=True)
class Answered:
    """A batch of answers by one arm. `work` is that of everything after the prompts, over `passes` of the batch."""

    answers: list[list[int]]
    ended: list[bool]  # by the model, not by the limit of tokens
    tokens: int  # padding inside an answer is no token
    forwards: int  # passes of every request, added up
    passes: int
    seconds: float  # from the prompts to the last answer
    work: Work


@dataclass(frozen=True)
class ArmResult:
    """One arm at one batch size; `prompt_seconds` is what reading each batch's prompts takes, the same for all arms."""

    name: str
    runs: list[Answered]
    prompt_seconds: list[float]
    roofline: Roofline
    experts_per_layer: float | None = None  # distinct ones that a step reads, by its routing

    @property
    def answer_seconds(self) -> list[float]:
        """Of every answer; in a batch it takes as long as the batch."""
        return [run.seconds for run in self.runs for _ in run.answers]

    def to_dict(self) -> dict[str, Any]:
        seconds, answers = sum(run.seconds for run in self.runs), self.answer_seconds
        tokens, passes = (sum(getattr(run, name) for run in self.runs) for name in ("tokens", "passes"))
        decoding_ms = 1e3 * (seconds - sum(self.prompt_seconds))
        work = Work.total(run.work for run in self.runs)
        measured = Measured(work, Timing.of([decoding_ms]), self.roofline)
        return {
            "answers": len(answers),
            "answer_seconds": {
                "mean": sum(answers) / len(answers), "p50": percentile(answers, 50), "p90": percentile(answers, 90)
            },
            "ms_per_token": 1e3 * sum(answers) / tokens,
            "tokens_per_second": tokens / seconds,
            "tokens_per_answer": tokens / len(answers),
            "tokens_per_forward": tokens / sum(run.forwards for run in self.runs),
            "passes": passes,
            "ms_per_pass": decoding_ms / passes,
            "bytes_per_token": work.bytes / tokens,
            "flops_per_token": work.flops / tokens,
            "gbps": measured.gbps,
            "share_of_bandwidth": measured.gbps / self.roofline.gbps,
            "tflops": measured.tflops,
            "share_of_matmul": measured.tflops / self.roofline.tflops,
            "experts_per_layer": self.experts_per_layer,
        }  # fmt: skip


@dataclass(frozen=True)
class SizeResult:
    """All arms at one batch size; none and an `error` when memory did not suffice."""

    batch: int
    arms: list[ArmResult]
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        if self.error is not None:
            return {"batch": self.batch, "error": self.error}
        read = self.arms[0].prompt_seconds
        prompt_ms = 1e3 * sum(read) / len(read)
        return {"batch": self.batch, "prompt_ms": prompt_ms, "arms": {arm.name: arm.to_dict() for arm in self.arms}}


def compare_ar(
    engine: Engine,
    probe: Probe,
    prompts: Sequence[list[int]],
    *,
    sizes: Sequence[int],
    fixed_passes: Sequence[int],
    settings: DecodeSettings,
    seed: int,
    progress: Callable[[str], None],
) -> Iterator[SizeResult]:
    """Answer `prompts` by every arm in batches of each of `sizes`; the first size that does not fit is the last.

    Sizes should divide the number of prompts: what is left over is not answered. fixed_passes: numbers of passes per
    canvas, each an arm beside the decoder's own stop. progress(name) is called after every batch of answers.
    """
    routes = Routes(engine.model)
    for size in sizes:
        try:
            result = _Comparison(engine, routes, prompts, size, fixed_passes, settings, seed).run(probe, progress)
        except (torch.OutOfMemoryError, MemoryShortage) as e:
            result = SizeResult(size, [], str(e) if isinstance(e, MemoryShortage) else OUT_OF_MEMORY)
        finally:
            release(engine.device)
        yield result
        if result.error is not None:
            return


def batches_of(prompts: int, sizes: Sequence[int], arms: int) -> int:
    """How often `compare_ar` calls its progress."""
    return sum(prompts // size * _rounds(prompts // size) * arms for size in sizes)


def _rounds(batches: int) -> int:
    return -(-LEAST_BATCHES // batches)


class _Comparison:
    """All arms at one batch size."""

    def __init__(
        self,
        engine: Engine,
        routes: Routes,
        prompts: Sequence[list[int]],
        size: int,
        fixed_passes: Sequence[int],
        settings: DecodeSettings,
        seed: int,
    ):
        self.engine, self.routes, self.size, self.settings, self.seed = engine, routes, size, settings, seed
        self.config, self.shapes = engine.config, Shapes.of(engine)
        self.groups = [list(prompts[i : i + size]) for i in range(0, len(prompts) // size * size, size)]
        self.lockstep = engine.fused is None or engine.tier != "turbo"
        self.greedy = self._decoder(max(map(len, prompts)))
        self.expert_reads = self.steps = 0
        self.arms: dict[str, Callable[[int], Answered]] = {AUTOREGRESSIVE: self._autoregressive}
        for passes in fixed_passes:
            # A canvas of n passes never has n equal ones before it.
            rule = settings.replace(max_denoising_steps=passes, stability_threshold=passes)
            self.arms[f"diffusion, {passes} passes"] = self._diffusion(rule)
        self.arms[OWN_STOP] = self._diffusion(settings)

    def run(self, probe: Probe, progress: Callable[[str], None]) -> SizeResult:
        self._warm_up()
        runs: dict[str, list[Answered]] = {name: [] for name in self.arms}
        prompt_seconds = []
        names, count = list(self.arms), len(self.groups)
        for turn in range(count * _rounds(count)):
            prompt_seconds.append(self._read_seconds(turn % count))
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                runs[name].append(self.arms[name](turn % count))
                progress(name)
        experts = {AUTOREGRESSIVE: self.expert_reads / self.steps / self.config.num_layers}
        return SizeResult(
            self.size,
            [ArmResult(name, runs[name], prompt_seconds, probe.roofline, experts.get(name)) for name in names],
        )

    def _decoder(self, longest: int) -> GreedyDecoder:
        limit, ends = self.settings.max_new_tokens, self.settings.eos_token_ids
        if self.lockstep:
            return ReferenceGreedy(self.engine.model, limit, ends)
        # Room for both: an answer token by token ends where its last canvas would.
        assert self.engine.fused is not None, "not in lockstep"
        runner = GraphRunner(self.engine.fused, self.size, longest + limit, rules=())
        return FusedGreedy(runner, limit, ends)

    def _warm_up(self) -> None:
        """Everything compiles and every graph is captured: both sizes of pieces that prompts are read in, each arm."""
        longest = max((prompt for group in self.groups for prompt in group), key=len)
        for prompt in (longest, longest[: self.config.canvas_length]):
            self.greedy.read([prompt] * self.size)
        for arm in self.arms.values():
            arm(0)
        self.expert_reads = self.steps = 0

    def _read_seconds(self, index: int) -> float:
        return wall_ms(lambda: self.greedy.read(self.groups[index]), self.engine.device) / 1e3

    def _autoregressive(self, index: int) -> Answered:
        prompts, answers = self.groups[index], []

        def answer() -> None:
            self.greedy.read(prompts)
            answers.extend(self.greedy.decode())

        seconds = wall_ms(answer, self.engine.device) / 1e3
        lengths = [len(tokens) for tokens in answers]
        experts = self.routes.experts_per_step(prompts, answers)
        self.expert_reads, self.steps = self.expert_reads + sum(experts), self.steps + len(experts)
        work = autoregressive_work(self.shapes, [len(prompt) for prompt in prompts], lengths, experts)
        ended = [tokens[-1] in self.settings.eos_token_ids for tokens in answers]
        return Answered(answers, ended, self._count(answers), sum(lengths), max(lengths), seconds, work)

    def _diffusion(self, rule: DecodeSettings) -> Callable[[int], Answered]:
        def answer(index: int) -> Answered:
            prompts = self.groups[index]
            first = self.seed + index * self.size
            seed = first if self.engine.tier != "turbo" else range(first, first + len(prompts))
            results = self.engine.generate_batch(prompts, seed=seed, **vars(rule))
            steps, answers = [r.steps_per_canvas for r in results], [r.token_ids for r in results]
            work, passes = diffusion_work(self.shapes, [len(prompt) for prompt in prompts], steps, self.lockstep)
            ended = [r.finish_reason == "stop" for r in results]
            forwards = sum(r.forwards for r in results)
            return Answered(
                answers, ended, self._count(answers), forwards, passes, max(r.seconds for r in results), work
            )

        return answer

    def _count(self, answers: list[list[int]]) -> int:
        return sum(count_tokens(answer, self.config.pad_token_id) for answer in answers)


def plot_comparison(path: Path, results: Sequence[SizeResult], roofline: Roofline, title: str) -> None:
    """Draw how every arm scales with the batch: time to an answer, throughput, bytes a token, shares of the limits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

    measured = [result.to_dict() for result in results if result.arms]
    panels: tuple[tuple[str, Callable[[dict[str, Any]], float]], ...] = (
        ("seconds to an answer, median", lambda arm: arm["answer_seconds"]["p50"]),
        ("tokens per second, all answers", lambda arm: arm["tokens_per_second"]),
        ("MB moved per token", lambda arm: arm["bytes_per_token"] / 1e6),
        ("share of measured bandwidth (line), FLOP/s (dashed)", lambda arm: arm["share_of_bandwidth"]),
    )
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    sizes = [row["batch"] for row in measured]
    for (label, value), panel in zip(panels, axes.flat, strict=True):
        for name in measured[0]["arms"] if measured else ():
            arms = [row["arms"][name] for row in measured]
            (line,) = panel.plot(sizes, [value(arm) for arm in arms], "o-", label=name)
            if panel is axes[1, 1]:
                panel.plot(sizes, [arm["share_of_matmul"] for arm in arms], "s--", color=line.get_color())
        panel.set(xscale="log", yscale="log", xlabel="answers in a batch", title=label)
        panel.set_xticks(sizes, [str(size) for size in sizes], minor=False)
        panel.set_xticks([], minor=True)
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.grid(True, which="both", alpha=0.2)
    axes[1, 1].yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.suptitle(f"{title}\nmeasured: {roofline.gbps:,.0f} GB/s, {roofline.tflops:.3g} TFLOP/s", fontsize=11)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save_figure(figure, path)
