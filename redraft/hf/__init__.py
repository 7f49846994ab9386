"""The same model inside transformers: packed experts under the official `generate`, and packed checkpoints.

Only this package touches transformers' internals. Importing it registers the quantisation method `dg-w4a16-v1`, so
that `from_pretrained` reads what `save_pretrained` wrote; docs/transformers.md shows the use.
"""

from transformers.quantizers.auto import register_quantization_config, register_quantizer

from redraft.hf.inplace import AccelerateReport, accelerate
from redraft.hf.quantizer import W4Config, W4Quantizer
from redraft.store.dg_w4a16 import FORMAT

register_quantization_config(FORMAT)(W4Config)
register_quantizer(FORMAT)(W4Quantizer)

__all__ = ["AccelerateReport", "W4Config", "accelerate"]
