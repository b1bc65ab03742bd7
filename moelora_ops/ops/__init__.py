"""The public ops: importing this package registers them with torch."""

from . import fused_moe_lora_activation as fused_moe_lora_activation  # no function of its own: rewrites put it into graphs
from .align import moe_lora_align_block_size
from .fused_experts_lora import fused_experts_lora
from .fused_moe_lora import fused_moe_lora

__all__ = ["fused_experts_lora", "fused_moe_lora", "moe_lora_align_block_size"]
