"""Router: which experts each token visits, and with what weight.

p = softmax_fp32(W (rmsnorm(x) * scale * H^-1/2)); the k largest p, renormalised to sum 1, times per_expert_scale.
It reads the raw residual, not the experts' normed input.

The Triton launch starts from the normed, scaled input that `residual_norms` wrote. With one program a tile of rows, a
canvas would keep 16 SMs busy, each reading all of W (720 KB), and leave the rest idle. Each tile's sum over H is
therefore spread over programs of `chunk` columns; the last one to finish, told by a counter, adds the parts up, always
in the order of their columns, so the result depends neither on who came last nor on the batch.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from redraft.kernels.launch import after_previous, dot, early_launch, rounded, tl, triton
from redraft.kernels.norms import rms_norm
from redraft.kernels.products import linear
from redraft.kernels.tables import LaunchSettings, run, settings_for

TILE_ROWS = 16


@dataclass(frozen=True)
class RouterSettings(LaunchSettings):
    """chunk: columns of H in one part: 6 parts of 2816, so 96 programs for 256 rows. A program takes block_k of them at
    a time: four steps, three of which are loading while one is multiplied."""

    tiles = ("block_k",)

    chunk: int = 512
    block_k: int = 128
    num_stages: int = 4
    num_warps: int = 8

    def shared(self) -> int:
        return self.num_stages * 2 * self.block_k * (128 + TILE_ROWS)  # of 128 experts


ROUTER = RouterSettings()


def route(
    x: torch.Tensor, proj: torch.Tensor, scale: torch.Tensor, per_expert_scale: torch.Tensor, top_k: int, eps: float,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """x [T, H], proj [E, H], scale [H], per_expert_scale [E] -> weights fp32 [T, k], expert ids int64 [T, k]."""
    normed = rms_norm(x, None, eps) * scale * x.shape[-1] ** -0.5
    probabilities = F.softmax(linear(normed, proj, batch_invariant), dim=-1, dtype=torch.float32)
    weights, experts = torch.topk(probabilities, top_k, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * per_expert_scale[experts], experts


def choose_reference(
    logits: torch.Tensor, per_expert_scale: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route` from its logits [T, E] on, ties to the lower expert id: weights fp32 [T, k], expert ids int64 [T, k]."""
    probabilities = F.softmax(logits, dim=-1, dtype=torch.float32)
    ordered, experts = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, experts = ordered[:, :top_k], experts[:, :top_k]
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * per_expert_scale[experts], experts


@dataclass(frozen=True)
class RouterScratch:
    """What `route_into` writes on its way; one serves all layers, whose launches follow each other."""

    parts: torch.Tensor  # fp32 [tiles, chunks, TILE_ROWS, experts]
    tickets: torch.Tensor  # int32 [tiles], zero between launches
    settings: RouterSettings


def router_scratch(
    rows: int, hidden: int, num_experts: int, device: torch.device, settings: RouterSettings | None = None
) -> RouterScratch:
    """Scratch for batches of up to `rows` rows."""
    settings = settings or settings_for("router", ROUTER)
    tiles, chunks = triton.cdiv(rows, TILE_ROWS), triton.cdiv(hidden, settings.chunk)
    parts = torch.empty(tiles, chunks, TILE_ROWS, _expert_block(num_experts), dtype=torch.float32, device=device)
    return RouterScratch(parts, torch.zeros(tiles, dtype=torch.int32, device=device), settings)


@triton.jit
def _part(
    x_ptr, proj_ptr, rows, e, chunk, R, H: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_E, BLOCK_M] product over columns chunk * CHUNK up to CHUNK more. Experts are the matrix rows."""
    acc = tl.zeros((BLOCK_E, BLOCK_M), tl.float32)
    for start in tl.range(0, CHUNK, BLOCK_K, num_stages=STAGES):
        k = chunk * CHUNK + start + tl.arange(0, BLOCK_K)
        proj = tl.load(proj_ptr + e[:, None] * H + k[None, :], mask=(e[:, None] < E) & (k[None, :] < H), other=0.0)
        x = tl.load(x_ptr + rows[None, :] * H + k[:, None], mask=(rows[None, :] < R) & (k[:, None] < H), other=0.0)
        acc += dot(proj, x)
    return acc


@triton.jit
def _choose(
    logits, scale_ptr, weights_ptr, experts_ptr, rows, e, R, dtype: tl.constexpr, E: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_TOP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Top-k of logits [BLOCK_M, BLOCK_E] and their softmax, whose sum over all experts renormalising cancels."""
    real = (e < E)[None, :]
    logits = tl.where(real, rounded(logits, dtype), -float("inf"))
    p = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    # These are not negative, so their bits order as they do; below them, a lower id makes a larger key.
    key = (p.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - e)[None, :].to(tl.int64)
    key = tl.where(real, key, -1)
    place = tl.arange(0, BLOCK_TOP)[None, :]
    weights = tl.zeros((BLOCK_M, BLOCK_TOP), tl.float32)
    experts = tl.zeros((BLOCK_M, BLOCK_TOP), tl.int32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.max(key, axis=1)
        expert = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
        weight = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        total += weight
        weights = tl.where(place == j, weight[:, None], weights)
        experts = tl.where(place == j, expert[:, None], experts)
        key = tl.where(e[None, :] == expert[:, None], -1, key)
    mask = (place < TOP_K) & (rows[:, None] < R)
    scale = tl.load(scale_ptr + experts, mask=mask, other=0.0).to(tl.float32)
    target = rows[:, None] * TOP_K + place
    tl.store(weights_ptr + target, weights / total[:, None] * scale, mask=mask)
    tl.store(experts_ptr + target, experts, mask=mask)


@triton.jit
def _route_kernel(
    x_ptr, proj_ptr, scale_ptr, weights_ptr, experts_ptr, parts_ptr, tickets_ptr, R,
    H: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_TOP: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    pid_m, pid_k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    rows = pid_m * BLOCK_M + m
    e = tl.arange(0, BLOCK_E)
    parts = parts_ptr + pid_m * (CHUNKS * BLOCK_E * BLOCK_M)
    part = _part(x_ptr, proj_ptr, rows, e, pid_k, R, H, E, CHUNK, BLOCK_K, BLOCK_E, BLOCK_M, STAGES)
    tl.store(parts + pid_k * (BLOCK_E * BLOCK_M) + m[None, :] * BLOCK_E + e[:, None], part)
    tl.debug_barrier()  # every warp has stored before the ticket, whose release covers them all
    if tl.atomic_add(tickets_ptr + pid_m, 1, sem="acq_rel") == CHUNKS - 1:
        tl.store(tickets_ptr + pid_m, 0)
        logits = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            at = parts + chunk * (BLOCK_E * BLOCK_M) + m[:, None] * BLOCK_E + e[None, :]
            logits += tl.load(at, cache_modifier=".cg")
        dtype = x_ptr.dtype.element_ty
        _choose(logits, scale_ptr, weights_ptr, experts_ptr, rows, e, R, dtype, E, TOP_K, BLOCK_TOP, BLOCK_M)


def route_into(
    router_in: torch.Tensor, proj: torch.Tensor, per_expert_scale: torch.Tensor, top_k: int, *, weights: torch.Tensor,
    experts: torch.Tensor, scratch: RouterScratch,
) -> None:  # fmt: skip
    """Route router_in [R, H], already normed and scaled, by proj [E, H]: weights fp32 [R, k], experts int32 [R, k].

    Logits are rounded to the model's dtype, as a matrix product in it does; ties go to the lower expert id.
    scratch comes from `router_scratch` for at least R rows.
    """
    (rows, hidden), num_experts, chunk = router_in.shape, proj.shape[0], scratch.settings.chunk
    tiles, chunks, block_e = triton.cdiv(rows, TILE_ROWS), triton.cdiv(hidden, chunk), _expert_block(num_experts)
    assert scratch.parts.shape[1:] == (chunks, TILE_ROWS, block_e), "the scratch belongs to another shape"
    assert scratch.tickets.shape[0] >= tiles, "the scratch is for fewer rows"
    run("router", scratch.settings, None, lambda s: _route_kernel[(tiles, chunks)](
        router_in, proj, per_expert_scale, weights, experts, scratch.parts, scratch.tickets, rows,
        H=hidden, E=num_experts, TOP_K=top_k, CHUNKS=chunks, CHUNK=chunk, BLOCK_K=s.block_k, BLOCK_E=block_e,
        BLOCK_M=TILE_ROWS, BLOCK_TOP=triton.next_power_of_2(top_k), STAGES=s.num_stages, num_warps=s.num_warps,
        **early_launch(),
    ))  # fmt: skip


def _expert_block(num_experts: int) -> int:
    return max(16, triton.next_power_of_2(num_experts))  # 16 is the least that the matrix units take
