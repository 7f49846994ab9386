"""`redraft inspect MODEL`: what a checkpoint holds and where it fits, from configuration and headers alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli.options import Json, Model

if TYPE_CHECKING:
    from redraft.config import ModelConfig, QuantSpec
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
    from redraft.store.open import open_model

    summary = summarize(open_model(model, verify))
    if json_output:
        print(json.dumps(summary))
    else:
        _print(summary)


def summarize(files: CheckpointFiles) -> dict[str, Any]:
    """The JSON object of this command. Bytes are exact; sizes in W4 are null where the group sizes do not divide."""
    spec, notes = _w4_spec(files)
    parts = _parts(files, spec)
    return {
        "path": str(files.path),
        "format": files.format,
        "spec": None if spec is None else {"group_gate_up": spec.group_gate_up, "group_down": spec.group_down},
        "shape": _shape(files.config),
        "parts": parts,
        "total": {key: _sum(parts.values(), key) for key in ("tensors", "parameters", "bytes", "w4_bytes")},
        "cards_gb": CARDS_GB,
        "fit": _fit(files, parts),
        "notes": files.notes + notes,
    }


def _w4_spec(files: CheckpointFiles) -> tuple[QuantSpec | None, list[str]]:
    """Group sizes of the packed form: the checkpoint's own, else the published ones if they fit."""
    from redraft.config import QuantSpec
    from redraft.errors import UsageError

    spec = files.spec or QuantSpec()
    try:
        spec.check(files.config)
    except UsageError as e:
        return None, [f"no size in W4: {e}"]
    return spec, []


def _shape(config: ModelConfig) -> dict[str, Any]:
    kinds = {layer.kind: layer for layer in config.layers}
    return {
        "hidden_size": config.hidden_size,
        "layers": config.num_layers,
        "full_attention_layers": [i for i, layer in enumerate(config.layers) if layer.kind == "full"],
        "heads": config.num_heads,
        "kv_heads": {kind: layer.num_kv_heads for kind, layer in kinds.items()},
        "head_dim": {kind: layer.head_dim for kind, layer in kinds.items()},
        "sliding_window": config.sliding_window,
        "intermediate_size": config.intermediate_size,
        "experts": config.num_experts,
        "experts_per_token": config.top_k_experts,
        "moe_intermediate_size": config.moe_intermediate_size,
        "vocab_size": config.vocab_size,
        "canvas_length": config.canvas_length,
        "context": config.max_position_embeddings,
    }


def _parts(files: CheckpointFiles, spec: QuantSpec | None) -> dict[str, dict[str, Any]]:
    """Per part: tensors (tied ones once), parameters, bytes as stored and in W4."""
    from redraft.store.dg_w4a16 import packed_bytes
    from redraft.store.names import PARTS, part_of

    parts: dict[str, dict[str, Any]] = {}
    for name, info in files.tensors.items():
        part = parts.setdefault(part_of(name), {"tensors": 0, "parameters": 0, "bytes": 0, "w4_bytes": 0})
        part["tensors"] += 1
        part["bytes"] += info.nbytes
        part["parameters"] += info.numel
        part["w4_bytes"] += info.nbytes
    config = files.config
    parts["experts"]["parameters"] = (
        3 * config.num_layers * config.num_experts * config.hidden_size * config.moe_intermediate_size
    )
    parts["experts"]["w4_bytes"] = None if spec is None else config.num_layers * packed_bytes(config, spec)
    return {name: parts[name] for name in PARTS if name in parts}


def _sum(parts: Any, key: str) -> int | None:
    values = [part[key] for part in parts]
    return None if None in values else sum(values)


def _fit(files: CheckpointFiles, parts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Bytes of weights and of one sequence's KV arena per context length, both in BF16 where they are not packed."""
    import torch

    from redraft.network.arena import arena_bytes

    loaded = {name: part for name, part in parts.items() if name not in ("vision", "other")}
    plain = 2 * sum(part["parameters"] for name, part in loaded.items() if name != "experts")
    packed, experts = loaded["experts"]["w4_bytes"], 2 * loaded["experts"]["parameters"]
    weights = {
        "w4": None if packed is None else plain + packed,
        "bf16": plain + experts if files.spec is None else None,  # a packed checkpoint has no BF16 experts to load
    }
    rows = []
    for context in CONTEXTS:
        if context > files.config.max_position_embeddings:
            continue
        arena = arena_bytes(files.config, 1, context, torch.bfloat16)
        totals = {form: None if size is None else size + arena for form, size in weights.items()}
        cards = {
            form: next((c for c in CARDS_GB if total <= c * 10**9), None) for form, total in totals.items() if total
        }
        rows.append({"context": context, "kv_bytes": arena, "bytes": totals, "smallest_card_gb": cards})
    return rows


def _print(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{summary['path']}: {summary['format']}", highlight=False)
    shape = Table("shape", "", show_header=False)
    for key, value in summary["shape"].items():
        shape.add_row(key, ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value))
    console.print(shape)
    parts = Table("part", "tensors", "parameters", "stored MB", "W4 MB")
    for name, part in {**summary["parts"], "total": summary["total"]}.items():
        parts.add_row(
            name,
            str(part["tensors"]),
            f"{part['parameters']:,}",
            _megabytes(part["bytes"]),
            _megabytes(part["w4_bytes"]),
        )
    console.print(parts)
    console.print(_fit_table(summary["fit"]))
    console.print(
        "Weights and KV arena of one sequence, GB = 10^9 bytes; a pass's workspace, mostly its logits, comes on top."
    )
    for note in summary["notes"]:
        console.print(f"note: {note}")


def _fit_table(fit: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("context", "KV MB", "W4 + KV MB", "BF16 + KV MB", *(f"{c} GB" for c in CARDS_GB), title="What fits")
    for row in fit:
        marks = []
        for card in CARDS_GB:
            forms = [
                name.upper() for name, total in row["bytes"].items() if total is not None and total <= card * 10**9
            ]
            marks.append(" ".join(forms) or "-")
        table.add_row(
            f"{row['context']:,}",
            _megabytes(row["kv_bytes"]),
            *(_megabytes(row["bytes"][form]) for form in ("w4", "bf16")),
            *marks,
        )
    return table


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.1f}"
