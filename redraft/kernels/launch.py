"""What the Triton kernels share: when they run, and the few operations that differ in Triton's interpreter.

The interpreter (TRITON_INTERPRET=1, set before the first import) runs the same kernels on a CPU for tests. Where Triton
is not installed the modules still import, for their torch references; `HAS_TRITON` says so.
"""

import os
from functools import lru_cache
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    HAS_TRITON = True
    # What a launch raises whose settings the card or the compiler cannot serve, before anything of it has run.
    REFUSED: tuple[type[Exception], ...] = (OutOfResources, PTXASError, CompilationError)
except ImportError:
    REFUSED = ()
    HAS_TRITON = False
    # Enough to define kernels that are never launched.
    triton = SimpleNamespace(jit=lambda function: function)
    tl = SimpleNamespace(constexpr=lambda value: SimpleNamespace(value=value))

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    gdc_launch_dependents = gdc_wait = None

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor = None

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def early_launch() -> dict[str, bool]:
    """Launch options of a kernel that begins with `after_previous`: on Hopper and later it may start before the launch
    ahead of it in the stream is over, which hides what a launch costs."""
    can = gdc_wait is not None and not INTERPRET.value and torch.cuda.is_initialized()
    early = can and from_hopper_on(torch.cuda.current_device())
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@lru_cache
def from_hopper_on(device: torch.device | int) -> bool:
    """Whether a GPU is of that generation or a later one."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Let the next launch of the stream start. `after_previous` does this too; a kernel that loads something before it
    does it first, so that the next launch does not wait for the loads."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def after_previous(EARLY: tl.constexpr):
    """Let the next launch of the stream start, and wait for all before this one to end.

    Nothing that a kernel writes may be read, and nothing written, earlier. That leaves a model's weights, which no
    kernel of a pass writes: loaded before this, they arrive while the kernel waits.
    """
    let_next_start(EARLY)
    if EARLY:
        gdc_wait()


@triton.jit
def dot(a, b):
    """fp32 a @ b of two tiles. The interpreter computes BF16 products wrongly, so there both are widened first."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 x with only the digits of `dtype`, in fp32.

    For BF16 the compiler must not see what happens: knowing that both sides of a later product or sum are BF16, it
    computes in BF16 and contracts the two into one operation, which leaves out a rounding. The interpreter truncates.
    """
    if dtype == tl.bfloat16:
        if INTERPRET:
            bits = x.to(tl.int32, bitcast=True)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.bf16.f32 high, $1; mov.b16 low, 0; mov.b32 $0, {low, high}; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return x.to(dtype).to(tl.float32)
