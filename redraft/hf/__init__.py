"""The same model inside transformers: packed experts under the official `generate`, and packed checkpoints.

Only this package touches transformers' internals. Importing it registers the quantisation method `dg-w4a16-v1`, so
that `from_pretrained` reads what `save_pretrained` wrote; docs/transformers.md shows the use.
"""

from redraft.hf.inplace import AccelerateReport, accelerate
from redraft.hf.quantizer import W4Config

__all__ = ["AccelerateReport", "W4Config", "accelerate"]
