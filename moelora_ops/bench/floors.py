"""What no kernel can beat on this device: bytes over bandwidth, operations over the matmul rate.

    floor base = max(bytes of the active experts' weights / copy bandwidth, FLOPs / matmul rate)
    floor LoRA = floor base + bytes of the active (adapter, expert) pairs' A and B / copy bandwidth

What is active follows from the batch: experts chosen by a token, and pairs in which the token has an adapter.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import reference
from ..testing.cases import Inputs
from .inputs import expert_bytes, pair_experts

KEY_BYTES = 64
PAIR_RANK_BYTES = 64
FIXED_BYTES = 65536


@dataclass(frozen=True)
class Ceilings:
    """Measured in the same run as everything that is compared with them."""

    bandwidth: float  # bytes per second of a copy, read plus written
    rate: float  # FLOP per second of a large matmul


def floor_us(batch: Inputs, ceilings: Ceilings) -> tuple[float, float]:
    """(floor base, floor LoRA) of a batch in microseconds."""
    flops = 2 * int((pair_experts(batch) >= 0).sum()) * sum(w[0].numel() for w in (batch.w13, batch.w2))
    base = max(expert_bytes(batch) / ceilings.bandwidth, flops / ceilings.rate)
    return base * 1e6, (base + lora_bytes(batch) / ceilings.bandwidth) * 1e6


def lora_bytes(batch: Inputs) -> int:
    """Bytes of A and B of the (adapter, expert) pairs that the batch needs, each up to its adapter's rank."""
    case = batch.case
    experts = pair_experts(batch)
    slots = reference.pair_slots(batch.token_lora_mapping, case.top_k, case.max_loras, batch.adapter_enabled)
    both = (experts >= 0) & (slots >= 0)
    slots = (slots * case.num_experts + experts)[both].unique() // max(case.num_experts, 1)
    ranks = slots.new_tensor(case.ranks or (case.max_lora_rank,) * case.max_loras)
    per_rank = (case.num_slices + 1) * (case.hidden_size + case.intermediate_size)
    return int(ranks[slots].sum()) * per_rank * batch.w13.element_size()


def memory_bound(batch: Inputs) -> int:
    """Bytes that a layer may ask for beyond its inputs and its output: P * (I + H) values + O(P * R) + counters.

    The constants: shrink results are at most eight fp32 partial sums of two slices (64 bytes a pair and rank), a sort counts
    E * (L + 1) keys a few times over, and tables have a few words a pair.
    """
    case = batch.case
    values = case.num_pairs * (case.intermediate_size + case.hidden_size) * batch.w13.element_size()
    keys = case.num_experts * (case.max_loras + 1)
    return values + PAIR_RANK_BYTES * case.num_pairs * case.max_lora_rank + KEY_BYTES * keys + FIXED_BYTES
