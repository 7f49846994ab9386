"""`redraft tune`: make a machine's own settings."""

from pathlib import Path
from typing import Annotated

import typer

from redraft.cli import options
from redraft.cli.common import print_json, working
from redraft.cli.measuring import show
from redraft.errors import RedraftError, UsageError
from redraft.tables import Table

app = options.group("Search for the settings that are fastest here.")


@app.command("kernels")
def kernels(
    only: options.Only = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The table to write, instead of the installed one.")
    ] = None,
    seed: options.Seed = 0, json_output: options.Json = False,
) -> None:  # fmt: skip
    """Try launch settings of every kernel on this GPU and write its table; wrong ones are refused."""
    import torch

    from redraft.bench.kernels import scale_for, select_cases
    from redraft.kernels.tables import current_gpu, table_path
    from redraft.tune.kernels import table, tune, write_table

    gpu = current_gpu()
    if gpu is None:
        raise RedraftError("tuning times kernels on a GPU, and torch sees none here")
    path = out or table_path(gpu.name)
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such directory; make it first or write elsewhere")
    device, trials = torch.device("cuda"), []
    with working("tuning") as status:
        for trial in tune(select_cases(only), scale_for(device), seed):
            trials.append(trial)
            status.update(f"tuning {trial.kernel}")
    if not trials:
        raise UsageError(f"no kernel called like {only!r} has settings to tune")
    content = table(trials, gpu.name, device)
    write_table(path, content)
    rows = []
    for trial in trials:
        name = ", ".join(f"{k} {v}" for k, v in trial.changes.items()) or "default"
        if trial.us is None:
            rows.append((trial.kernel, name, "-", f"refused: {trial.reason}"))
        else:
            mark = "chosen" if content["settings"][trial.kernel] == dict(trial.changes) else ""
            rows.append((trial.kernel, name, f"{trial.us:.1f}", mark))
    show(Table(("kernel", "settings", "us", ""), rows), f"wrote {path}")
    if json_output:
        print_json({**content, "path": str(path)})
