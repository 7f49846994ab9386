"""When kernels may start before the launch ahead of them is over."""

import pytest
import torch

from redraft.kernels import launch


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("interpreted", [False, True])
def test_early_launch(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], interpreted: bool) -> None:
    """On Hopper and later, and not in the interpreter, which may run on a machine with such a GPU."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(launch, "gdc_wait", object())
    monkeypatch.setattr(launch, "INTERPRET", launch.tl.constexpr(interpreted))
    launch.from_hopper_on.cache_clear()
    early = capability >= (9, 0) and not interpreted
    assert launch.early_launch() == ({"EARLY": True, "launch_pdl": True} if early else {"EARLY": False})
    launch.from_hopper_on.cache_clear()
