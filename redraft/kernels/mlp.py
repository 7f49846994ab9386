"""Gated MLP with tanh-GELU: down(gelu(gate(x)) * up(x)).

gelu(g) = g/2 * (1 + tanh(u)) = g / (1 + exp(-2u)), u = sqrt(2/pi) * (g + 0.044715 g^3): the second form needs no tanh
and loses no digits where tanh nears -1.

On large batches the products are the matrix library's, and `gated_into` stands between them. At a canvas of 256 rows
the library's blocks take every multiprocessor whole, and nothing runs beside them; `gated_product_into` and
`product_into` leave room for the router that `fused.py` launches beside the MLP.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from redraft.kernels import launch
from redraft.kernels.launch import after_previous, dot, early_launch, rounded, tl, triton
from redraft.kernels.products import linear
from redraft.kernels.tables import LaunchSettings, current_gpu, run, settings_for

# Batch invariance on a CPU: torch's GELU has other code for what is left of each thread's share; up to so many elements
# are one thread's, in whole vectors.
GELU_SHARE = 16384


def gated(gate: torch.Tensor, up: torch.Tensor, *, batch_invariant: bool = False) -> torch.Tensor:
    """tanh-GELU(gate) * up, elementwise."""
    if not batch_invariant:
        return F.gelu(gate, approximate="tanh") * up
    shares = gate.split(max(1, GELU_SHARE // gate.shape[-1]), dim=-2)
    return torch.cat([F.gelu(share, approximate="tanh") for share in shares], dim=-2) * up


def gated_mlp(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, batch_invariant: bool = False
) -> torch.Tensor:
    """x [..., H], gate and up [I, H], down [H, I] -> [..., H]."""
    inner = gated(linear(x, gate, batch_invariant), linear(x, up, batch_invariant), batch_invariant=batch_invariant)
    return linear(inner, down, batch_invariant)


@triton.jit
def gelu_tanh(x):
    """tanh-GELU of fp32 values."""
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * u))


@triton.jit
def _gated_kernel(gate_up_ptr, out_ptr, I: tl.constexpr, BLOCK_I: tl.constexpr, EARLY: tl.constexpr):  # noqa: E741
    after_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    keep = cols < I
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * 2 * I + cols, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * I + I + cols, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * I + cols, rounded(rounded(gelu_tanh(gate), dtype) * up, dtype), mask=keep)


@dataclass(frozen=True)
class GatedSettings(LaunchSettings):
    """block: columns a program; 1,024 gives 4 warps one 16-byte load of each half a thread, and 3 programs a row of
    2,112."""

    block: int = 1024
    num_warps: int = 4


GATED = GatedSettings()


def gated_into(gate_up: torch.Tensor, out: torch.Tensor, settings: GatedSettings | None = None) -> None:
    """out [R, I] = tanh-GELU(gate) * up of gate_up [R, 2I] = [gate | up], both contiguous, any float dtype."""
    rows, intermediate = out.shape
    run("mlp.gated", settings, GATED, lambda s: _gated_kernel[(rows, triton.cdiv(intermediate, s.block))](
        gate_up, out, I=intermediate, BLOCK_I=s.block, num_warps=s.num_warps, **early_launch()
    ))  # fmt: skip


@dataclass(frozen=True)
class ProductSettings(LaunchSettings):
    """A program makes rows x columns of the output and loads `depth` of the summed dimension at a time."""

    tiles = ("rows", "columns", "depth")

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int

    def shared(self) -> int:
        return self.num_stages * 2 * self.depth * (self.rows + 2 * self.columns)  # of the gated product


# A canvas of 256 rows makes 2 x 33 programs of gate and up, 2 x 44 of down.
PRODUCT = ProductSettings(rows=128, columns=64, depth=64, num_warps=8, num_stages=4)


def products_fit(device: torch.device) -> bool:
    """Whether a GPU takes `gated_product_into` and `product_into` as they were measured, not shrunk to fit."""
    gpu = current_gpu(device)
    if gpu is None or launch.TensorDescriptor is None or not launch.from_hopper_on(device):
        return False
    kernels = ("mlp.gated_product", "mlp.product")
    return all(settings_for(kernel, PRODUCT, gpu, fit=False).shared() <= gpu.shared for kernel in kernels)


@triton.jit
def _gated_product_kernel(
    x_desc, weight_desc, out_ptr, R, K: tl.constexpr, I: tl.constexpr,  # noqa: E741
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(1) * BLOCK_M, tl.program_id(0) * BLOCK_N
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = x_desc.load([m, k])
        gate += dot(x, weight_desc.load([n, k]).T)
        up += dot(x, weight_desc.load([I + n, k]).T)
    rows, cols = m + tl.arange(0, BLOCK_M)[:, None], n + tl.arange(0, BLOCK_N)[None, :]
    dtype = out_ptr.dtype.element_ty
    out = rounded(gelu_tanh(rounded(gate, dtype)), dtype) * rounded(up, dtype)
    tl.store(out_ptr + rows.to(tl.int64) * I + cols, rounded(out, dtype), mask=(rows < R) & (cols < I))


@triton.jit
def _product_kernel(
    x_desc, weight_desc, out_ptr, R, K: tl.constexpr, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(1) * BLOCK_M, tl.program_id(0) * BLOCK_N
    out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        out += dot(x_desc.load([m, k]), weight_desc.load([n, k]).T)
    rows, cols = m + tl.arange(0, BLOCK_M)[:, None], n + tl.arange(0, BLOCK_N)[None, :]
    keep = (rows < R) & (cols < N)
    tl.store(out_ptr + rows.to(tl.int64) * N + cols, rounded(out, out_ptr.dtype.element_ty), mask=keep)


def gated_product_into(
    x: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor, settings: ProductSettings | None = None
) -> None:
    """out [R, I] = tanh-GELU(x @ gate^T) * (x @ up^T) for x [R, K] and gate_up [2I, K] = gate above up, all BF16.

    Both products are rounded to BF16 before the activation, as separate ones are. K a multiple of 8.
    """
    _launch_product("mlp.gated_product", _gated_product_kernel, x, gate_up, out, settings)


def product_into(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, settings: ProductSettings | None = None
) -> None:
    """out [R, N] = x @ weight^T for x [R, K] and weight [N, K], all BF16; K a multiple of 8."""
    _launch_product("mlp.product", _product_kernel, x, weight, out, settings)


def _launch_product(
    name: str, kernel: Any, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, settings: ProductSettings | None
) -> None:
    (rows, depth), columns = x.shape, out.shape[1]
    run(name, settings, PRODUCT, lambda s: kernel[(triton.cdiv(columns, s.columns), triton.cdiv(rows, s.rows))](
        launch.TensorDescriptor.from_tensor(x, [s.rows, s.depth]),
        launch.TensorDescriptor.from_tensor(weight, [s.columns, s.depth]),
        out, rows, depth, columns, BLOCK_M=s.rows, BLOCK_N=s.columns, BLOCK_K=s.depth,
        num_warps=s.num_warps, num_stages=s.num_stages,
    ))  # fmt: skip
