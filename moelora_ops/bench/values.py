"""Values first: every cell is compared with the reference before anything is timed.

The reference computes in fp32 on some tokens of the batch, with each token's own experts and adapter, so that large cells take
no longer than small ones. Errors are relative to the delta, not to the total.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from .. import reference
from ..testing.cases import Inputs
from ..testing.numerics import TOLERANCES, assert_close
from ..testing.oracle import assert_bitwise, assert_delta_close
from . import calls
from .inputs import idle, some_rows, unloaded

CHECKED_TOKENS = 32

Layer = Callable[[Inputs], Tensor]


def check_layer(batch: Inputs, base: Layer = calls.base, lora: Layer = calls.lora) -> None:
    """Base and delta against the reference; no adapter in the batch, and none in the pool, against the base in every bit."""
    actual_base, actual = base(batch), lora(batch)
    assert_bitwise(lora(idle(batch)), actual_base, "no token with an adapter")
    assert_bitwise(lora(unloaded(batch)), actual_base, "no adapter in the pool")
    assert torch.isfinite(actual).all(), "with adapters: NaN or infinity"
    rows, part = some_rows(batch, CHECKED_TOKENS)
    want_base, want = _layer(part, adapters=False), _layer(part, adapters=True)
    assert_close(actual_base[rows], want_base, TOLERANCES[batch.case.dtype], what="base")
    assert_delta_close(actual[rows], actual_base[rows], want, want_base)


def check_align(batch: Inputs) -> None:
    """The alignment, entry by entry."""
    args, options = batch.align(calls.BLOCK_SIZE)
    want = reference.moe_lora_align_block_size(*args, **options)
    for name, actual, expected in zip(("sorted_token_ids", "expert_ids", "num_tokens_post_padded"), calls.align(batch), want):
        assert_bitwise(actual, expected, name)


def check_delta(delta: calls.Delta) -> None:
    """What one call of the delta path adds to zeros, for both projections."""
    batch, case = delta.batch, delta.batch.case
    delta.gate_up_out.zero_()
    delta.down_out.zero_()
    delta()
    rows, part = some_rows(batch, CHECKED_TOKENS)
    args, options = part.align(1)
    routing = reference.moe_lora_align_block_size(*args, **options)
    act = delta.act.view(case.num_tokens, case.top_k, -1)[rows].flatten(0, 1)
    for what, out, x, (lora_a, lora_b), weighted in (
        ("gate_up delta", delta.gate_up_out, part.hidden_states, batch.gate_up_lora(), False),
        ("down delta", delta.down_out, act, batch.down_lora(), True),
    ):
        want = torch.zeros_like(out[rows], dtype=torch.float32)
        reference.fused_moe_lora(
            want, x.float(), lora_a, lora_b, part.topk_weights, *routing,
            lora_ranks=batch.lora_ranks, mul_routed_weight=weighted,
        )  # fmt: skip
        assert_close(out[rows], want, TOLERANCES[case.dtype], what=what)


def _layer(part: Inputs, *, adapters: bool) -> Tensor:
    """The reference layer on fp32 inputs: it computes in fp32 and returns fp32."""
    args, options = part.replace(hidden_states=part.hidden_states.float()).experts(adapters=adapters)
    return reference.fused_experts_lora(*args, **options)
