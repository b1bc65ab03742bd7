"""Every op in plain PyTorch: the definition, the oracle of the tests, and the CPU path where there is no compiler.

All math runs in fp32 (fp64 for fp64 inputs) and rounds once, at the end. Ids outside their range mean "no adapter" and "no
expert". The signatures are those of `torch.ops.moelora.*`.

Legend: T tokens, K top_k, P = T * K pairs, E experts, L adapter slots, R the pool's rank, H hidden, I intermediate, S slices.
"""

from __future__ import annotations

from typing import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .routing import align_capacity, round_up


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
    """Sort the pairs of each adapter slot by expert and pad every group to whole blocks.

    Args and Returns: see `moelora_ops.moe_lora_align_block_size`.
    """
    num_pairs = topk_ids.numel()
    capacity = align_capacity(num_pairs, num_experts, block_size)
    sorted_token_ids = topk_ids.new_full((max_loras, capacity), num_pairs, dtype=torch.int32)
    expert_ids = topk_ids.new_full((max_loras, capacity // block_size), -1, dtype=torch.int32)

    slot = pair_slots(token_lora_mapping, topk_ids.shape[1], max_loras, adapter_enabled)
    expert = pair_experts(topk_ids, num_experts, expert_map)
    routed = (slot >= 0) & (expert >= 0)
    key = torch.where(routed, slot * num_experts + expert, max_loras * num_experts)
    order = key.argsort(stable=True)[: int(routed.sum())]  # by (slot, expert), ascending pairs inside
    key = key[order]

    count = torch.bincount(key, minlength=max_loras * num_experts)  # per (slot, expert)
    padded = round_up(count, block_size).view(max_loras, num_experts)
    first_column = (padded.cumsum(1) - padded).flatten()
    place_in_group = torch.arange(len(order), device=order.device) - (count.cumsum(0) - count)[key]
    sorted_token_ids[slot[order], first_column[key] + place_in_group] = order.int()
    for row, blocks in zip(expert_ids, padded // block_size):
        experts = torch.arange(num_experts, dtype=torch.int32, device=row.device).repeat_interleave(blocks)
        row[: len(experts)] = experts
    return sorted_token_ids, expert_ids, padded.sum(1).int()


def fused_moe_lora(
    output: Tensor,
    hidden_states: Tensor,
    lora_a_stacked: Sequence[Tensor],
    lora_b_stacked: Sequence[Tensor],
    topk_weights: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    *,
    lora_ranks: Tensor | None = None,
    mul_routed_weight: bool = False,
    offset: int = 0,
) -> None:
    """Add each pair's adapter delta to `output`, in place.

    output[t, k, offset + s * N : offset + (s + 1) * N] += [w] * B_s[l, e] (A_s[l, e] x)

    Args: see `moelora_ops.fused_moe_lora`.
    """
    num_tokens, top_k, _ = output.shape
    rows_per_input = top_k if hidden_states.shape[0] == num_tokens else 1
    width = lora_b_stacked[0].shape[2]
    for slot, expert, pairs in _aligned_groups(sorted_token_ids, expert_ids, num_tokens_post_padded, num_tokens * top_k):
        if not _has_expert(expert, (*lora_a_stacked, *lora_b_stacked)):
            continue
        x = accumulate(hidden_states[pairs // rows_per_input])
        token, choice = pairs // top_k, pairs % top_k
        for s, (a, b) in enumerate(zip(lora_a_stacked, lora_b_stacked)):
            rank = slot_rank(lora_ranks, slot, a.shape[2])
            delta = x @ accumulate(_of_expert(a, slot, expert)[:rank]).T @ accumulate(_of_expert(b, slot, expert)[:, :rank]).T
            if mul_routed_weight:
                delta = delta * accumulate(topk_weights)[token, choice, None]
            columns = slice(offset + s * width, offset + (s + 1) * width)
            output[token, choice, columns] = (accumulate(output[token, choice, columns]) + delta).to(output.dtype)


def fused_experts_lora(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    lora_a13: Tensor | None,
    lora_b13: Tensor | None,
    lora_a2: Tensor | None,
    lora_b2: Tensor | None,
    *,
    lora_ranks: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    swiglu_alpha: float = 1.702,
    swiglu_limit: float | None = None,
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float = 1.0,
) -> Tensor:
    """The whole expert layer with each token's adapter inside.

    gu  = W13[e] x + b13[e] + B13[l, e] (A13[l, e] x)
    y_k = w * (W2[e] act(gu) + b2[e] + B2[l, e] (A2[l, e] act(gu)))
    out = routed_scaling_factor * sum_k y_k

    Args and Returns: see `moelora_ops.fused_experts_lora`.
    """
    top_k = topk_ids.shape[1]
    max_loras = next((t.shape[0] for t in (lora_a13, lora_a2) if t is not None), 0)
    slot = pair_slots(token_lora_mapping, top_k, max_loras, adapter_enabled)
    expert = pair_experts(topk_ids, w13.shape[0], expert_map)
    x = accumulate(hidden_states)
    weight = accumulate(topk_weights).flatten()[:, None]  # [P, 1]
    y = x.new_zeros(topk_ids.numel(), w2.shape[1])  # [P, H]
    for e, pairs in _groups(expert):
        xe = x[pairs // top_k]
        if apply_router_weight_on_input:
            xe = xe * weight[pairs]
        gu = xe @ accumulate(w13[e]).T
        if w13_bias is not None:
            gu = gu + accumulate(w13_bias[e])
        _add_gate_up_delta(gu, xe, slot[pairs], lora_a13, lora_b13, lora_ranks, e, gated, interleaved)
        h = activate(gu, activation, gated=gated, interleaved=interleaved, alpha=swiglu_alpha, limit=swiglu_limit)
        ye = h @ accumulate(w2[e]).T
        if w2_bias is not None:
            ye = ye + accumulate(w2_bias[e])
        _add_down_delta(ye, h, slot[pairs], lora_a2, lora_b2, lora_ranks, e)
        y[pairs] = ye if apply_router_weight_on_input else ye * weight[pairs]
    out = routed_scaling_factor * y.view(*topk_ids.shape, y.shape[1]).sum(1)
    return out.to(hidden_states.dtype)


def activate(gu: Tensor, activation: str, *, gated: bool, interleaved: bool, alpha: float, limit: float | None) -> Tensor:
    """The activation between the two projections: [..., S * I] -> [..., I].

    silu, gelu, gelu_tanh, relu2: f(gate) * up, or f(gu) when not gated; swigluoai: (up + 1) * gate * sigmoid(alpha * gate).
    With `limit`, gate is clamped from above and up on both sides first.
    """
    if not gated:
        return _ACTIVATIONS[activation](gu)
    gate, up = (gu[..., 0::2], gu[..., 1::2]) if interleaved else gu.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "swigluoai":
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    return _ACTIVATIONS[activation](gate) * up


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def accumulate(tensor: Tensor) -> Tensor:
    """The tensor in the accumulation dtype: fp32, or fp64 for fp64 tensors."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def pair_slots(token_lora_mapping: Tensor, top_k: int, max_loras: int, adapter_enabled: Tensor | None) -> Tensor:
    """Adapter slot of each pair, [P] int64; -1 for none, out of range or disabled."""
    slot = token_lora_mapping.long()
    slot = torch.where((slot >= 0) & (slot < max_loras), slot, -1)
    if adapter_enabled is not None and max_loras > 0:
        slot = torch.where(adapter_enabled.bool()[slot.clamp(min=0)], slot, -1)
    return slot.repeat_interleave(top_k)


def pair_experts(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> Tensor:
    """Local expert of each pair, [P] int64; -1 for out of range or not on this rank."""
    expert = topk_ids.flatten().long()
    if expert_map is not None:
        known = (expert >= 0) & (expert < expert_map.shape[0])
        mapped = expert_map.long()[expert.clamp(0, max(expert_map.shape[0] - 1, 0))] if expert_map.numel() else expert
        expert = torch.where(known, mapped, -1)
    return torch.where((expert >= 0) & (expert < num_experts), expert, -1)


def slot_rank(lora_ranks: Tensor | None, slot: int, max_rank: int) -> int:
    """Rank of a slot's adapter, clamped to the pool's rank."""
    return max_rank if lora_ranks is None else min(max(int(lora_ranks[slot]), 0), max_rank)


def _groups(ids: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(id, positions) for each id >= 0 that occurs."""
    for value in ids.unique().tolist():
        if value >= 0:
            yield value, (ids == value).nonzero().flatten()


def _aligned_groups(
    sorted_token_ids: Tensor, expert_ids: Tensor, num_tokens_post_padded: Tensor, num_pairs: int
) -> Iterator[tuple[int, int, Tensor]]:
    """(slot, expert, pairs) for each block of an alignment, without its padding."""
    if expert_ids.numel() == 0:
        return
    block_size = sorted_token_ids.shape[1] // expert_ids.shape[1]
    for slot, padded in enumerate(num_tokens_post_padded.tolist()):
        for block, expert in enumerate(expert_ids[slot, : max(padded, 0) // block_size].tolist()):
            pairs = sorted_token_ids[slot, block * block_size : (block + 1) * block_size].long()
            yield slot, expert, pairs[(pairs >= 0) & (pairs < num_pairs)]


def _has_expert(expert: int, tensors: Sequence[Tensor]) -> bool:
    """Whether every stacked tensor has this expert; an expert dimension of 1 serves all."""
    return expert >= 0 and all(t.shape[1] == 1 or expert < t.shape[1] for t in tensors)


def _of_expert(stacked: Tensor, slot: int, expert: int) -> Tensor:
    return stacked[slot, 0 if stacked.shape[1] == 1 else expert]


def _add_gate_up_delta(
    gu: Tensor,
    x: Tensor,
    slot: Tensor,
    lora_a13: Tensor | None,
    lora_b13: Tensor | None,
    lora_ranks: Tensor | None,
    expert: int,
    gated: bool,
    interleaved: bool,
) -> None:
    """gu += concat_s(B13[l, e, s] (A13[l, e, s] x)), slice by slice: gate has its own A and up has its own A."""
    if lora_a13 is None or lora_b13 is None:
        return
    max_rank, width = lora_b13.shape[3], lora_b13.shape[2]
    half = width // 2
    if not gated:
        slices = [slice(None)]
    elif interleaved:
        slices = [slice(0, None, 2), slice(1, None, 2)]
    else:
        slices = [slice(0, half), slice(half, None)]
    for l, rows in _groups(slot):
        rank = slot_rank(lora_ranks, l, max_rank)
        a, b = accumulate(_of_expert(lora_a13, l, expert)), accumulate(lora_b13[l, expert])
        for s, columns in enumerate(slices):
            z = x[rows] @ a[s * max_rank : s * max_rank + rank].T
            gu[rows, columns] += z @ b[columns, :rank].T


def _add_down_delta(
    y: Tensor,
    h: Tensor,
    slot: Tensor,
    lora_a2: Tensor | None,
    lora_b2: Tensor | None,
    lora_ranks: Tensor | None,
    expert: int,
) -> None:
    """y += B2[l, e] (A2[l, e] h)."""
    if lora_a2 is None or lora_b2 is None:
        return
    for l, rows in _groups(slot):
        rank = slot_rank(lora_ranks, l, lora_a2.shape[2])
        z = h[rows] @ accumulate(lora_a2[l, expert, :rank]).T
        y[rows] += z @ accumulate(_of_expert(lora_b2, l, expert)[:, :rank]).T
