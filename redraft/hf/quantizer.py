"""The quantisation method `dg-w4a16-v1` for `from_pretrained` and `save_pretrained`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from redraft.config import QuantSpec
from redraft.errors import UsageError
from redraft.hf.experts import W4Experts, adopt_kernels, check_model, layers, set_ties
from redraft.hf.tiers import install
from redraft.quant.rtn import packed_experts
from redraft.store import dg_w4a16
from redraft.store.names import packed_name
from redraft.store.read import CheckpointFiles, open_checkpoint


class W4Config(QuantizationConfigMixin):
    """`from_pretrained(..., quantization_config=W4Config())`: packs BF16 experts while loading, or reads packed ones.

    Group sizes as in QuantSpec; those of packed files come from the files.
    """

    def __init__(self, group_gate_up: int = 128, group_down: int = 64, quant_method: str = dg_w4a16.FORMAT):
        self.quant_method = quant_method  # type: ignore[assignment]
        self.group_gate_up, self.group_down = group_gate_up, group_down
        self.spec()

    def spec(self) -> QuantSpec:
        """The group sizes. Raises UsageError when they are not even numbers."""
        return QuantSpec(self.group_gate_up, self.group_down)


class W4Quantizer(HfQuantizer):
    """Loads and saves packed experts.

    Where config.json names the method and an index the expert files, as `redraft quantize` and `save_pretrained` write
    them, transformers loads the experts itself, parameter by parameter. From every other directory it loads all but
    the experts, and Redraft's reader adds those layer by layer, packing them when they are BF16: beside the packed
    model, one layer of unpacked experts exists at a time. In either case the files are checked before.
    """

    requires_calibration = False
    is_trainable = False
    quantization_config: W4Config
    _files: CheckpointFiles | None = None  # while loading: where experts are that transformers does not read

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> Any:
        config, names = check_model(model), [Path(file) for file in checkpoint_files or []]
        if not names or names[0].suffix != ".safetensors":
            raise UsageError("packed experts are loaded from a directory or hub id with safetensors; none were found")
        files = open_checkpoint(names[0].parent)
        spec = files.spec or self.quantization_config.spec()
        spec.check(config)
        self.quantization_config.group_gate_up, self.quantization_config.group_down = dataclasses.astuple(spec)
        held = {place.file.name for places in files.text.values() for place in places}
        complete = self.pre_quantized and files.format == dg_w4a16.FORMAT and held <= {file.name for file in names}
        self._files = None if complete else files
        # Read afterwards, or there for a transformers without Redraft: nothing to complain about.
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = ignored | {r"\.experts\."}
        for layer in (layer for pair in layers(model) for layer in pair):
            layer.experts = W4Experts.empty(config, spec) if complete else W4Experts(config, spec)
        set_ties(model)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        config, spec = check_model(model), self.quantization_config.spec()
        for index, (decoder, encoder) in enumerate(layers(model)):
            if self._files is not None:
                device = decoder.router.proj.weight.device
                if device.type == "meta":
                    what = "packed experts must fit the device their layer runs on"
                    raise UsageError(f"layer {index} is offloaded; {what}")
                packed = packed_experts(self._files, index, spec, device)
                decoder.experts = W4Experts(config, spec, vars(packed)).adopt_kernels(model.dtype)
            encoder.experts = decoder.experts.requires_grad_(False)
        self._files = None
        adopt_kernels(model)
        install(model, "off")
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        """The state dict with experts as in the file format, and the fence that stops a loader without Redraft."""
        state = model.state_dict()
        if model.model.decoder.layers[0].experts.repacked is not None:
            for index, (decoder, _) in enumerate(layers(model)):
                for name, tensor in vars(decoder.experts.packed()).items():
                    state[packed_name(index, name)] = tensor.cpu()
        state[dg_w4a16.FENCE] = torch.empty(0, dtype=torch.uint8)
        return state, {}
