"""The KV arena: what stays, what slides out, and how large it is."""

import torch

from redraft.config import ModelConfig
from redraft.network.arena import KVArena, LayerCache, arena_bytes

CPU = torch.device("cpu")


def _rows(values: range) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.tensor(list(values), dtype=torch.float32).view(1, 1, -1, 1)
    return keys, -keys


def test_full_layer_keeps_every_row():
    cache = LayerCache((1, 1, 9, 1), None, torch.float32, CPU)
    cache.extend(*_rows(range(4)))
    keys, values = cache.extend(*_rows(range(4, 9)))
    assert keys.flatten().tolist() == list(range(9)) and values.flatten().tolist() == [-i for i in range(9)]
    assert cache.prefix()[0].shape[2] == 9


def test_sliding_layer_keeps_its_window():
    """Window 4: a later query sees 3 stored rows. Room for 2 more is slack for commits that write in place."""
    cache = LayerCache((1, 1, 5, 1), 4, torch.float32, CPU)
    long, _ = cache.extend(*_rows(range(8)))
    assert long.flatten().tolist() == list(range(8)), "a long prompt attends to itself before it slides out"
    assert cache.prefix()[0].flatten().tolist() == [5, 6, 7]
    in_place, _ = cache.extend(*_rows(range(8, 10)))
    assert in_place.flatten().tolist() == [5, 6, 7, 8, 9]
    assert cache.prefix()[0].flatten().tolist() == [7, 8, 9]
    keys, _ = cache.extend(*_rows(range(10, 12)))
    assert keys.flatten().tolist()[-5:] == [7, 8, 9, 10, 11]
    assert cache.prefix()[1].flatten().tolist() == [-9, -10, -11]


def test_arena_bytes_counts_what_is_allocated(tiny_hf):
    config = ModelConfig.from_dict(tiny_hf.config.to_dict())
    for capacity in (5, 17, 100):
        arena = KVArena(config, 3, capacity, torch.bfloat16, CPU)
        allocated = sum(t.numel() * t.element_size() for c in arena.layers for t in (c.keys, c.values))
        assert allocated == arena_bytes(config, 3, capacity, torch.bfloat16)
    # Sliding layers stop growing: per further position only the full layer's 1 KV head of 16 is added, twice, in BF16.
    grown = arena_bytes(config, 1, 101, torch.bfloat16) - arena_bytes(config, 1, 100, torch.bfloat16)
    assert grown == 2 * 16 * 2
