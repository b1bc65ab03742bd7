"""moelora_ops: LoRA adapters on the experts of Mixture-of-Experts models, as PyTorch ops.

Importing registers `torch.ops.moelora.*`. It touches no GPU and compiles nothing.
"""

import os as _os

# In a source tree the sibling folder meta/ wins over whatever an editable install elsewhere would offer.
_here = _os.path.dirname(_os.path.abspath(__file__))
_root = _os.path.dirname(_here)
if not _os.path.isdir(_os.path.join(_here, "meta")) and _os.path.isfile(_os.path.join(_root, "meta", "__init__.py")):
    __path__.append(_root)

from . import compile as compile  # light: Inductor is imported by its enable()
from .adapters import LoraAdapter, LoraPool, load_adapter
from .errors import AdapterError, UnsupportedError
from .layers import FusedMoEWithLoRA, MoeRunner
from .ops import fused_experts_lora, fused_moe_lora, moe_lora_align_block_size
from .routing import token_lora_mapping

__version__ = "0.1.0"
__all__ = [
    "AdapterError",
    "FusedMoEWithLoRA",
    "LoraAdapter",
    "LoraPool",
    "MoeRunner",
    "UnsupportedError",
    "fused_experts_lora",
    "fused_moe_lora",
    "load_adapter",
    "moe_lora_align_block_size",
    "token_lora_mapping",
]
