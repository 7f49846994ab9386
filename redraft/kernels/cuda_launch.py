"""Launching kernels of our own CUDA C++ source, also before the launch ahead of them is over.

torch compiles such source (NVRTC) and launches it, but without attributes. One of them, programmatic launch, lets a
kernel start on multiprocessors that the kernel ahead has left; it must then wait (`griddepcontrol.wait`) before it
touches what that kernel writes. CUDA graphs keep the attribute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

PROGRAMMATIC_LAUNCH = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute; its value is a union of 64 bytes, here a number."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


def compile_kernel(source: Path, name: str, arch: str, defines: dict[str, int]) -> Any:
    """Kernel `name` of a source file for the current device. Raises RuntimeError or OSError where that cannot be."""
    text = "".join(f"#define {macro} {value}\n" for macro, value in defines.items()) + source.read_text("utf-8")
    return torch.cuda._compile_kernel(text, name, compute_capability=arch)


def launch(
    kernel: Any, blocks: int, threads: int, args: Sequence[torch.Tensor | int], shared: int = 0, *, early: bool = False
) -> None:
    """Launch on the current stream; tensors are passed as pointers, numbers as int.

    shared: bytes of dynamic shared memory, configured before. early: before the kernel ahead is over.
    Raises RuntimeError when CUDA refuses.
    """
    values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int(a) for a in args]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    attribute = _Attribute(id=PROGRAMMATIC_LAUNCH, value=1)
    configuration = _Configuration(
        (blocks, 1, 1),
        (threads, 1, 1),
        shared,
        torch.cuda.current_stream().cuda_stream,
        ctypes.pointer(attribute),
        int(early),
    )
    status = _driver().cuLaunchKernelEx(ctypes.byref(configuration), kernel.func, pointers, None)
    if status:
        raise RuntimeError(f"CUDA error {status} at the launch of a kernel of {blocks} blocks, {shared} bytes")


@lru_cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
