"""`redraft compare-ar`: diffusion against autoregressive decoding, on the same weights, prompts and device.

The encoder is a causal language model on the decoder's weights, so each prompt can also be answered one token a step.
All prompts are answered at every batch size by every arm, a batch at a time; the arms take turns at going first. Where
that makes fewer than LEAST_BATCHES batches, they are answered several times.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from redraft.bench.autoregressive import FusedGreedy, Greedy, ReferenceGreedy, Routes
from redraft.bench.batch import OUT_OF_MEMORY, release
from redraft.bench.roofline import Measured, Roofline, Work, save_figure
from redraft.bench.timing import Timing, percentile, wall_ms
from redraft.bench.work import Shapes, autoregressive_work, denoise_passes, diffusion_work
from redraft.config import DecodeSettings, ModelConfig
from redraft.engine.engine import Engine
from redraft.engine.events import count_tokens
from redraft.engine.graphs import GraphRunner
from redraft.errors import MemoryShortage

AUTOREGRESSIVE = "autoregressive"
OWN_STOP = "diffusion, own stop"
LEAST_BATCHES = 3


@dataclass(frozen=True)
class Answered:
    """A batch of answers by one arm. `work` is that of its passes after the prompts were read."""

    answers: list[list[int]]
    passes: list[list[int]]  # of the batch: committed tokens of every request that each moved on
    work: Work
    seconds: float  # from the prompts to the last answer
    experts: int = 0  # distinct ones that autoregressive steps read, over all of them and all layers


Arm = Callable[[Sequence[list[int]], int], Answered]  # of prompts and the first one's seed


@dataclass
class SizeResult:
    """All arms at one batch size; none and an `error` when memory did not suffice."""

    batch: int
    config: ModelConfig
    roofline: Roofline
    arms: dict[str, list[Answered]] = field(default_factory=dict)
    prompt_seconds: list[float] = field(default_factory=list)  # of reading each batch's prompts, the same for all arms
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        if self.error is not None:
            return {"batch": self.batch, "error": self.error}
        prompt_ms = 1e3 * sum(self.prompt_seconds) / len(self.prompt_seconds)
        arms = {name: self.figures(answered) for name, answered in self.arms.items()}
        return {"batch": self.batch, "prompt_ms": prompt_ms, "arms": arms}

    def figures(self, answered: Sequence[Answered]) -> dict[str, Any]:
        """Of one arm. In a batch every answer takes as long as the batch; padding inside an answer is no token."""
        answers = [(answer, batch.seconds) for batch in answered for answer in batch.answers]
        waits = [seconds for _, seconds in answers]
        tokens = sum(count_tokens(answer, self.config.pad_token_id) for answer, _ in answers)
        passes = [requests for batch in answered for requests in batch.passes]
        seconds, experts = sum(batch.seconds for batch in answered), sum(batch.experts for batch in answered)
        decoding = Timing.of([1e3 * (seconds - sum(self.prompt_seconds))])
        measured = Measured(Work.total(batch.work for batch in answered), decoding, self.roofline)
        return {
            "answers": len(answers),
            "answer_seconds": {
                "mean": sum(waits) / len(waits), "p50": percentile(waits, 50), "p90": percentile(waits, 90)
            },
            "ms_per_token": 1e3 * sum(waits) / tokens, "tokens_per_second": tokens / seconds,
            "tokens_per_answer": tokens / len(answers), "tokens_per_forward": tokens / sum(map(len, passes)),
            "passes": len(passes), "ms_per_pass": measured.ms / len(passes),
            "bytes_per_token": measured.work.bytes / tokens, "flops_per_token": measured.work.flops / tokens,
            "gbps": measured.gbps, "share_of_bandwidth": measured.gbps / self.roofline.gbps,
            "tflops": measured.tflops, "share_of_matmul": measured.tflops / self.roofline.tflops,
            "experts_per_layer": experts / len(passes) / self.config.num_layers if experts else None,
        }  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Prompts answered by every arm. Sizes should divide their number: what is left over is not answered."""

    engine: Engine
    roofline: Roofline
    prompts: Sequence[list[int]]
    sizes: Sequence[int]  # of batches
    fixed_passes: Sequence[int]  # numbers of passes per canvas, each an arm beside the decoder's own stop
    settings: DecodeSettings
    seed: int

    @property
    def lockstep(self) -> bool:
        """Whether the reference network runs."""
        return self.engine.fused is None or self.engine.tier != "turbo"

    @property
    def total(self) -> int:
        """Batches of answers: how often `run` calls its progress."""
        return sum(len(self._starts(size)) for size in self.sizes) * (len(self.fixed_passes) + 2)

    def run(self, progress: Callable[[str], object]) -> Iterator[SizeResult]:
        """Answer by every arm, size by size; the first that does not fit is the last.

        progress(name of the arm) is called after every batch of answers.
        """
        routes = Routes(self.engine.model)
        for size in self.sizes:
            result = SizeResult(size, self.engine.config, self.roofline)
            try:
                self._answer(result, routes, progress)
            except (torch.OutOfMemoryError, MemoryShortage) as e:
                result.arms.clear()
                result.error = str(e) if isinstance(e, MemoryShortage) else OUT_OF_MEMORY
            finally:
                release(self.engine.device)
            yield result
            if result.error is not None:
                return

    def _starts(self, size: int) -> list[int]:
        """The first prompt of every batch that an arm answers."""
        once = [i * size for i in range(len(self.prompts) // size)]
        return once * -(-LEAST_BATCHES // len(once))

    def _answer(self, result: SizeResult, routes: Routes, progress: Callable[[str], object]) -> None:
        """Every arm's answers at one size, added to the result."""
        size, device = result.batch, self.engine.device
        greedy = self._decoder(size)
        arms: dict[str, Arm] = {AUTOREGRESSIVE: partial(self._token_by_token, greedy, routes)}
        for passes in self.fixed_passes:
            # A canvas of n passes never has n equal ones before it.
            rule = self.settings.replace(max_denoising_steps=passes, stability_threshold=passes)
            arms[f"diffusion, {passes} passes"] = partial(self._by_diffusion, rule)
        arms[OWN_STOP] = partial(self._by_diffusion, self.settings)
        # Everything compiles and every graph is captured: both sizes of pieces that prompts are read in, each arm.
        longest = max(self.prompts, key=len)
        for prompt in (longest, longest[: self.engine.config.canvas_length]):
            greedy.read([prompt] * size)
        for arm in arms.values():
            arm(self.prompts[:size], self.seed)
        result.arms.update({name: [] for name in arms})
        for turn, start in enumerate(self._starts(size)):
            prompts, first = self.prompts[start : start + size], turn % len(arms)
            result.prompt_seconds.append(wall_ms(partial(greedy.read, prompts), device) / 1e3)
            for name in [*arms][first:] + [*arms][:first]:
                result.arms[name].append(arms[name](prompts, self.seed + start))
                progress(name)

    def _decoder(self, size: int) -> Greedy:
        limit, ends = self.settings.max_new_tokens, self.settings.eos_token_ids
        if self.engine.fused is None or self.lockstep:
            return ReferenceGreedy(self.engine.model, size, limit, ends)
        # Room for both: an answer token by token ends where its last canvas would.
        runner = GraphRunner(self.engine.fused, size, max(map(len, self.prompts)) + limit, rules=())
        return FusedGreedy(runner, limit, ends)

    def _token_by_token(self, greedy: Greedy, routes: Routes, prompts: Sequence[list[int]], seed: int) -> Answered:
        """A step commits a canvas of one token; the first reads the prompt's last."""
        answers: list[list[int]] = []
        seconds = wall_ms(lambda: answers.extend(greedy.answer(prompts)), self.engine.device) / 1e3
        steps = [[1] * len(answer) for answer in answers]
        passes = denoise_passes([len(prompt) - 1 for prompt in prompts], steps, 1, lockstep=False)
        experts = routes.experts_per_step(prompts, answers)
        work = autoregressive_work(Shapes.of(self.engine), passes, experts)
        return Answered(answers, passes, work, seconds, sum(experts))

    def _by_diffusion(self, rule: DecodeSettings, prompts: Sequence[list[int]], seed: int) -> Answered:
        results, shapes = self.engine.generate_batch(prompts, seed=seed, **vars(rule)), Shapes.of(self.engine)
        steps = [result.steps_per_canvas for result in results]
        passes = denoise_passes([*map(len, prompts)], steps, shapes.config.canvas_length, self.lockstep)
        work = diffusion_work(shapes, passes, steps, self.lockstep)
        return Answered([r.token_ids for r in results], passes, work, max(r.seconds for r in results))


def plot_comparison(path: Path, results: Sequence[SizeResult], roofline: Roofline, title: str) -> None:
    """Draw how every arm scales with the batch: time to an answer, throughput, bytes a token, shares of the limits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

    measured = [result.to_dict() for result in results if result.arms]
    panels: dict[str, Callable[[dict[str, Any]], float]] = {
        "seconds to an answer, median": lambda arm: arm["answer_seconds"]["p50"],
        "tokens per second, all answers": lambda arm: arm["tokens_per_second"],
        "MB moved per token": lambda arm: arm["bytes_per_token"] / 1e6,
        "share of measured bandwidth (line), FLOP/s (dashed)": lambda arm: arm["share_of_bandwidth"],
    }
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    sizes = [row["batch"] for row in measured]
    for (label, value), panel in zip(panels.items(), axes.flat, strict=True):
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
