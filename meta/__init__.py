"""Per op: the schema, the shape contract (`check`) and the fake kernel (`fake`). Installed as `moelora_ops.meta`.

Everything here runs on sizes, dtypes and devices alone: no Triton, no compiled extension, no data. Real kernels and fake
kernels call the same `check`, before anything is written.
"""

if __name__ != "moelora_ops.meta":
    raise ImportError("import this package as moelora_ops.meta: a second import would register the schemas twice")

from . import fused_experts_lora, fused_moe_lora, moe_lora_align_block_size

OPS = (moe_lora_align_block_size, fused_moe_lora, fused_experts_lora)
