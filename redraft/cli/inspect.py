"""`redraft inspect MODEL`: what a checkpoint holds and where it fits, from configuration and headers alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli.options import Json, Model
from redraft.config import ModelConfig, QuantSpec
from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.store.read import CheckpointFiles

CARDS_GB = (8, 12, 16, 24, 32, 48, 80, 141)
CONTEXTS = (1024, 8192, 32_768, 131_072)


def command(
    model: Model,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every tensor with the hashes in manifest.json.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Show shapes, parameters, bytes per part, format, and what fits in which memory; loads no weights."""
    from redraft.cli.common import print_json
    from redraft.store.open import open_model

    summary = summarize(open_model(model, verify))
    if json_output:
        print_json(summary)
    else:
        _print(summary)


def summarize(files: CheckpointFiles) -> dict[str, Any]:
    """The JSON object of this command. Bytes are exact.

    `spec` and sizes in W4 are the checkpoint's own, else those of the published group sizes, or null if these do not
    divide.
    """
    spec: QuantSpec | None
    spec, notes = files.spec or QuantSpec(), files.notes
    try:
        spec.check(files.config)
    except UsageError as e:
        spec, notes = None, [*notes, f"no size in W4: {e}"]
    parts = _parts(files, spec)
    total: dict[str, int | None] = {}
    for key in ("tensors", "parameters", "bytes", "w4_bytes"):
        values = [part[key] for part in parts.values()]
        total[key] = None if None in values else sum(values)
    return {
        "path": str(files.path), "format": files.format, "spec": None if spec is None else dataclasses.asdict(spec),
        "shape": _shape(files.config), "parts": parts, "total": total, "cards_gb": CARDS_GB,
        "fit": _fit(files, parts), "notes": notes,
    }  # fmt: skip


def _shape(config: ModelConfig) -> dict[str, Any]:
    kinds = {layer.kind: layer for layer in config.layers}
    return {
        "hidden_size": config.hidden_size, "layers": config.num_layers,
        "full_attention_layers": [i for i, layer in enumerate(config.layers) if layer.kind == "full"],
        "heads": config.num_heads, "kv_heads": {kind: layer.num_kv_heads for kind, layer in kinds.items()},
        "head_dim": {kind: layer.head_dim for kind, layer in kinds.items()},
        "sliding_window": config.sliding_window, "intermediate_size": config.intermediate_size,
        "experts": config.num_experts, "experts_per_token": config.top_k_experts,
        "moe_intermediate_size": config.moe_intermediate_size, "vocab_size": config.vocab_size,
        "canvas_length": config.canvas_length, "context": config.max_position_embeddings,
    }  # fmt: skip


def _parts(files: CheckpointFiles, spec: QuantSpec | None) -> dict[str, dict[str, Any]]:
    """Per part: tensors (tied ones once), parameters, bytes as stored and in W4."""
    from redraft.store.dg_w4a16 import packed_bytes

    parts: dict[str, dict[str, Any]] = {}
    for part, infos in files.parts.items():
        parameters, size = sum(info.numel for info in infos), sum(info.nbytes for info in infos)
        parts[part] = {"tensors": len(infos), "parameters": parameters, "bytes": size, "w4_bytes": size}
    config, experts = files.config, parts["experts"]
    matrix = config.hidden_size * config.moe_intermediate_size
    experts["parameters"] = 3 * config.num_layers * config.num_experts * matrix
    experts["w4_bytes"] = None if spec is None else config.num_layers * packed_bytes(config, spec)
    return parts


def _fit(files: CheckpointFiles, parts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Bytes of weights and of one sequence's KV arena per context length, both in BF16 where they are not packed."""
    import torch

    from redraft.network.arena import arena_bytes

    loaded = {name: part for name, part in parts.items() if name not in ("vision", "other")}
    experts = loaded.pop("experts")
    plain, packed = 2 * sum(part["parameters"] for part in loaded.values()), experts["w4_bytes"]
    weights = {"w4": None if packed is None else plain + packed, "bf16": plain + 2 * experts["parameters"]}
    if files.spec is not None:
        weights["bf16"] = None  # a packed checkpoint has no BF16 experts to load
    rows = []
    for context in (c for c in CONTEXTS if c <= files.config.max_position_embeddings):
        arena = arena_bytes(files.config, 1, context, torch.bfloat16)
        totals = {form: None if size is None else size + arena for form, size in weights.items()}
        cards = {form: [c for c in CARDS_GB if total <= c * 10**9] for form, total in totals.items() if total}
        smallest = {form: min(larger, default=None) for form, larger in cards.items()}
        rows.append({"context": context, "kv_bytes": arena, "bytes": totals, "smallest_card_gb": smallest})
    return rows


def _print(summary: dict[str, Any]) -> None:
    from redraft.cli.common import output_console
    from redraft.tables import Table

    console = output_console()
    console.print(f"{summary['path']}: {summary['format']}")
    console.print(Table(("shape", ""), [(key, _text(value)) for key, value in summary["shape"].items()]))
    rows = []
    for name, part in {**summary["parts"], "total": summary["total"]}.items():
        sizes = _megabytes(part["bytes"]), _megabytes(part["w4_bytes"])
        rows.append((name, part["tensors"], f"{part['parameters']:,}", *sizes))
    console.print(Table(("part", "tensors", "parameters", "stored MB", "W4 MB"), rows))
    columns = ("context", "KV MB", "W4 + KV MB", "BF16 + KV MB", *(f"{card} GB" for card in CARDS_GB))
    console.print(Table(columns, map(_fit_row, summary["fit"]), "What fits"))
    workspace = "a pass's workspace, mostly its logits, comes on top"
    console.print(f"Weights and KV arena of one sequence, GB = 10^9 bytes; {workspace}.")
    for note in summary["notes"]:
        console.print(f"note: {note}")


def _fit_row(row: dict[str, Any]) -> list[str]:
    """A context's sizes, and which forms fit into each card."""
    sizes = {form.upper(): size for form, size in row["bytes"].items() if size is not None}
    marks = [" ".join(form for form, size in sizes.items() if size <= card * 10**9) or "-" for card in CARDS_GB]
    megabytes = map(_megabytes, (row["kv_bytes"], row["bytes"]["w4"], row["bytes"]["bf16"]))
    return [f"{row['context']:,}", *megabytes, *marks]


def _text(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.1f}"
