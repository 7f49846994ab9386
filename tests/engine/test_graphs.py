"""Launches as CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from redraft.engine.graphs import PassGraph


@pytest.mark.gpu
def test_a_graph_keeps_the_workspace_of_its_products():
    """torch frees workspaces when it deletes or compiles other graphs. Whoever gets that memory must not find our sums
    in it, nor we theirs."""
    device = torch.device("cuda")
    x, w = torch.randn(2, 64, 65536, device=device).bfloat16()  # a long sum, which the library splits over a workspace
    out = torch.empty(64, 64, dtype=torch.bfloat16, device=device)
    graph = PassGraph(lambda: torch.mm(x, w.t(), out=out), device)
    graph.replay()
    expected = out.clone()
    torch._C._cuda_clearCublasWorkspaces()
    others = []
    for _ in range(32):  # each of torch's streams, as memory goes back to the stream that it was taken on
        with torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
            others.append(torch.full((2**23,), 7, dtype=torch.int32, device=device))
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    assert all(bool((other == 7).all()) for other in others)
