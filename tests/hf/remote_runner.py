"""Run in a process of its own: load a directory by its own code where no Redraft can be imported.

remote_runner.py DIRECTORY HUB_ID RESULTS. RESULTS gets, by tier, the logits of one pass and the tokens of one
generation; then the model is saved to DIRECTORY-saved and loaded from there, and once more by its hub id.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any


class Blocker:
    """Makes `import redraft` fail as if it were not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == "redraft":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def results(model: Any) -> dict[str, Any]:
    """Logits with self-conditioning, and tokens."""
    import torch

    generator = torch.Generator().manual_seed(3)
    prompt = torch.tensor([[2, 30, 41]])
    vocab, length = model.config.text_config.vocab_size, model.config.canvas_length
    with torch.no_grad():
        canvas = torch.randint(0, vocab, (1, length), generator=generator)
        before = torch.randn(1, length, vocab, generator=generator)
        logits = model(input_ids=prompt, decoder_input_ids=canvas, self_conditioning_logits=before).logits
    torch.manual_seed(5)
    sequences = model.generate(prompt, max_new_tokens=length, max_denoising_steps=2, eos_token_id=[1]).sequences
    return {"logits": logits, "sequences": sequences}


def main(directory: str, hub_id: str, target: str) -> None:
    sys.meta_path.insert(0, Blocker())
    import torch
    from transformers import AutoModelForMultimodalLM, DiffusionGemmaForBlockDiffusion

    auto, found = AutoModelForMultimodalLM.from_pretrained, {}
    load = partial(auto, trust_remote_code=True)
    for tier in ("off", "bitexact", "turbo"):
        model = load(directory, tier=tier)
        found[tier] = results(model)
    found["state"] = model.state_dict()
    found["replaced"], found["kept"] = model.set_tier("turbo")
    model.save_pretrained(f"{directory}-saved")
    again, info = load(f"{directory}-saved", tier="off", output_loading_info=True)
    found["again"], found["info"] = again.state_dict(), {key: list(value) for key, value in info.items()}
    found["hub"] = results(load(hub_id, tier="off"))
    found["modules"] = sorted(name for name in sys.modules if name.split(".")[0] == "redraft")
    refused = {
        "without trust": auto,
        "by transformers' own class": DiffusionGemmaForBlockDiffusion.from_pretrained,
        "unknown tier": partial(load, tier="fast"),
    }
    for name, refuse in refused.items():
        try:
            refuse(directory)
            found[name] = "loaded"
        except Exception as e:
            found[name] = f"{type(e).__name__}: {e}"
    torch.save(found, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
