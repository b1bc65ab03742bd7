"""The align op: sort routed pairs by adapter and expert, in the layout that SGLang's and vLLM's kernels read."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import reference
from ..kernels import native
from ..meta import moe_lora_align_block_size as contract
from . import _library

_CUDA = native.op(contract.NAME, "cuda")


def _cpu(*args: Any, **kwargs: Any) -> Any:
    contract.check(*args, **kwargs)
    return reference.moe_lora_align_block_size(*args, **kwargs)


def _cuda(*args: Any, **kwargs: Any) -> Any:
    contract.check(*args, **kwargs)
    if _CUDA is not None:
        return _CUDA(*args, **kwargs)
    from ..kernels.triton import align

    return align.moe_lora_align_block_size(*args, **kwargs)


_OP = _library.register(contract.SCHEMA, check=contract.check, fake=contract.fake, cpu=_cpu, cuda=_cuda)


def moe_lora_align_block_size(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    *,
    adapter_enabled: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the routed pairs of each adapter slot by expert, every group padded to whole blocks.

    Pair p = t * K + k of token t and choice k. With EM = round_up(min(P * bs, P + num_experts * (bs - 1)), bs):

    Args:
        topk_ids: (T, K) int32 or int64, expert of each choice; ids outside [0, num_experts) are skipped.
        token_lora_mapping: (T,) int32 or int64, adapter slot of each token; -1 or outside [0, max_loras): no adapter.
        num_experts: number of experts that `topk_ids` counts (global ones when `expert_map` is given); K must not exceed it.
        block_size: rows of a block (bs), the BLOCK_M of the kernel that reads the result.
        max_loras: number of adapter slots L; 0 gives empty outputs.
        adapter_enabled: (>= L,) int32 or bool; 0 disables a slot.
        expert_map: (num_experts,) int32 or int64, global to local expert id, -1 not here; `expert_ids` then holds local ids,
            and groups are ordered by them.

    Returns:
        sorted_token_ids (L, EM) int32: row l holds the pairs of slot l grouped by expert (ascending), ascending inside a
        group, each group padded with P to a multiple of bs; the rest is P.
        expert_ids (L, EM / bs) int32: expert of each block; the rest is -1.
        num_tokens_post_padded (L,) int32: sum over experts of round_up(count, bs); 0 for idle and disabled slots.

    Raises: ValueError, TypeError naming the argument, what was expected and what came.
    Source: the layout of SGLang's and vLLM's moe_lora_align_block_size.
    """
    result: tuple[Tensor, Tensor, Tensor] = _OP(
        topk_ids, token_lora_mapping, num_experts, block_size, max_loras, adapter_enabled=adapter_enabled, expert_map=expert_map
    )
    return result
