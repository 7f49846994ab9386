"""What the machine can do: memory bandwidth, matrix products, the cost of a launch, and the ridge between them.

Data are random, never zeros: hardware may compress or power-gate zeros. Buffers exceed the caches several times.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from redraft.bench.roofline import Roofline
from redraft.bench.timing import measure
from redraft.device import default_dtype, device_name

LAUNCHES = 1000
FP8 = "float8_e4m3fn"


@dataclass(frozen=True)
class Probe:
    """Measured limits of one device. Launch costs are us, None without a GPU's graphs."""

    device: str
    copy_gbps: float  # bytes read and bytes written both count
    read_gbps: float
    matmul_tflops: dict[str, float]  # by dtype
    launch_us: float
    graph_launch_us: float | None
    roofline_dtype: str  # of matrix products here: the one a roofline is drawn for

    @property
    def roofline(self) -> Roofline:
        """The better of the two bandwidths, so that a share of it is never flattering."""
        return Roofline(max(self.copy_gbps, self.read_gbps), self.matmul_tflops[self.roofline_dtype])

    @property
    def ridges(self) -> dict[str, float]:
        """FLOP per byte from which on arithmetic is the limit, by dtype."""
        return {name: Roofline(self.roofline.gbps, rate).ridge for name, rate in self.matmul_tflops.items()}

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ridge_flop_per_byte": self.ridges}


def probe(device: torch.device, seconds: float = 0.3) -> Probe:
    """Measure a device; `seconds` is about what each figure may take."""
    bandwidth, products, launch = _bandwidth(device, seconds), _matmuls(device, seconds), _launch_us(device, seconds)
    in_graph = _launch_us(device, seconds, graph=True) if device.type == "cuda" else None
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what is measured next gets the memory back
    return Probe(device_name(device), *bandwidth, products, launch, in_graph, _short(default_dtype(device)))


def _bandwidth(device: torch.device, seconds: float) -> tuple[float, float]:
    """GB/s of a copy and of a read."""
    count = 2**24  # 64 MB of fp32 on a CPU
    if device.type == "cuda":
        count = min(2**31, torch.cuda.mem_get_info(device)[0] // 8)
    dtype = default_dtype(device)
    source = torch.empty(count, dtype=dtype, device=device).uniform_(-1, 1)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device, seconds=seconds).median
    read = measure(lambda: source.sum(dtype=torch.float32), device, seconds=seconds).median
    size = count * dtype.itemsize
    return 2 * size / copy / 1e6, size / read / 1e6


def _matmuls(device: torch.device, seconds: float) -> dict[str, float]:
    """TFLOP/s of square products, per dtype the device supports."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device) for _ in range(2))

    def rate(product: Callable[[], object]) -> float:
        return 2 * n**3 / measure(product, device, seconds=seconds).median / 1e9

    rates = {}
    for dtype in (torch.bfloat16,) if device.type == "cuda" else (torch.float32, torch.bfloat16):
        rates[_short(dtype)] = rate(partial(torch.mm, a.to(dtype), b.to(dtype)))
    nvidia = device.type == "cuda" and torch.version.hip is None
    if nvidia and torch.cuda.get_device_capability(device) >= (8, 9):  # FP8 tensor cores: Ada, Hopper and later
        x, y, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t(), torch.ones((), device=device)
        rates[FP8] = rate(lambda: torch._scaled_mm(x, y, one, one, out_dtype=torch.bfloat16))
    return rates


def _launch_us(device: torch.device, seconds: float, graph: bool = False) -> float:
    """Microseconds per launch of a one-element kernel, launched one after the other or inside one CUDA graph."""
    x = torch.rand(1, device=device)
    return measure([lambda: x.add_(1)] * LAUNCHES, device, seconds=seconds, graph=graph).median * 1e3


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
