"""`redraft profile`: where a pass's time goes and what could be gained."""

from typing import Any

from redraft.cli import options
from redraft.cli.bench import print_step
from redraft.cli.common import print_json, working
from redraft.cli.measuring import load, show
from redraft.tables import Table


@options.grouped
def command(
    *, model: options.Model, prompt_tokens: options.PromptTokens = 1024, batch: options.Batch = 1,
    passes: options.Passes = 16, loading: options.Loading, json_output: options.Json = False,
) -> None:  # fmt: skip
    """Show a pass by part, how busy the GPU is, and what making each part free would give (Amdahl's bound)."""
    from redraft.bench.profile import amdahl, device_activity, to_dict
    from redraft.bench.step import bench_step, open_step

    subject = load(model, loading)
    engine = subject.engine
    about: dict[str, Any] = {"prompt_tokens": prompt_tokens, "batch": batch, "passes": passes}
    with working("profiling"):
        step = bench_step(engine, subject.limits, **about, rounds=3)
        activity = device_activity(open_step(engine, batch, prompt_tokens), engine.device)
    print_step(step)
    rows = [(b.name, f"{b.ms:.3f}", f"{b.left_ms:.3f}", f"{b.speedup:.2f}x") for b in amdahl(step)]
    show(Table(("were it free", "ms", "ms a pass would take", "faster by"), rows, "Amdahl's bound"))
    if activity is None:
        show("No GPU: how busy it is was not measured.")
    else:
        operations = [(o.name[:100], f"{o.count:g}", f"{o.ms:.3f}") for o in activity.operations]
        show(
            Table(("GPU operation", "times a pass", "ms a pass"), operations, "Most expensive"),
            f"GPU busy {activity.busy_ms:.3f} of {step.pass_ms:.3f} ms ({activity.busy_ms / step.pass_ms:.1%}), "
            f"{activity.count:g} operations a pass",
        )
    if json_output:
        print_json({**subject.describe(), **about, **to_dict(step, activity)})
