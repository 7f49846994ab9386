"""Devices: which to run on and in which dtype, their memory, and what a figure measured on one depends on."""

import platform
import resource
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from redraft.errors import UsageError
from redraft.version import __version__


def pick_device(name: str | None) -> torch.device:
    """The named device ("cpu", "cuda", "cuda:N"), or the GPU when there is one. UsageError when it is not there."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = None
    with suppress(RuntimeError):
        device = torch.device(name)
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"device is {name!r}, expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {name} is not available: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def default_dtype(device: torch.device) -> torch.dtype:
    """BF16 on a GPU; fp32 on a CPU, where BF16 is slow or emulated on most machines."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated, None where the system does not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def synchronize(device: torch.device) -> None:
    """Wait for everything queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Start a new peak of allocated memory (a GPU's only; a process's peak cannot be restarted)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Peak of allocated bytes since `reset_peak` on a GPU; the process's peak resident size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure depends on: device and versions."""
    return {
        "device": device_name(device), "redraft": __version__, "torch": torch.__version__,
        "transformers": _version("transformers"), "triton": _version("triton"), "python": platform.python_version(),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
    }  # fmt: skip


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None
