"""Weights on the device, shared by the cells of a shape, and batches that never find them in the L2."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..testing.cases import Case, Inputs
from .cells import Cell

FEW_TOKENS = 512  # up to here each token draws its adapter, above requests of REQUEST_TOKENS do
REQUEST_TOKENS = 256


class Weights:
    """The weights of the last cell asked for; another pool or shape replaces them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inputs: Inputs | None = None

    def of(self, cell: Cell) -> Inputs:
        """Random weights and adapters of a cell's shape and pool, without tokens."""
        case = cell.case().like(num_tokens=0, adapters="none", experts="uniform")
        if self._inputs is None or self._inputs.case != case:
            self._inputs = None  # freed first: two pools of 64 adapters do not fit
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self._inputs = case.make(self._device)
        return self._inputs


def num_sets(num_tokens: int) -> int:
    """Distinct (input, routing) sets that a timing runs through: large batches are far larger than the L2 by themselves."""
    return 6 if num_tokens <= 1024 else 2


def make_batches(weights: Inputs, cell: Cell, cache: int, seed: int = 0) -> list[Inputs]:
    """The distinct sets of a cell. `cache` is the L2's size in bytes.

    Where the weights of one set are small against the L2 (T = 1), the sets choose experts that none before them chose, as
    far as there are enough.
    """
    case = cell.case()
    generator = torch.Generator(weights.w13.device).manual_seed(seed)
    batches: list[Inputs] = []
    taken: Tensor | None = None
    for i in range(num_sets(case.num_tokens)):
        logits = router_logits(case, generator)
        if taken is not None and logits.shape[1] - int(taken.sum()) >= case.top_k:
            logits[:, taken] = -torch.inf
        chosen_logits, topk_ids = logits.topk(case.top_k, dim=1)
        batch = weights.replace(
            case=case,
            hidden_states=_randn(generator, case.num_tokens, case.hidden_size, dtype=case.dtype),
            topk_weights=chosen_logits.softmax(-1),
            topk_ids=topk_ids.int(),
            token_lora_mapping=token_slots(case, generator, i),
        )
        batches.append(batch)
        if expert_bytes(batch) < 2 * cache:
            chosen = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
            chosen[topk_ids.flatten()] = True
            taken = chosen if taken is None else taken | chosen
    return batches


def is_cold(batches: list[Inputs], cache: int) -> bool | None:
    """Whether no set can find its weights in the L2; None where its size is not known.

    True when the smallest set is larger than the L2, or when no two sets share an expert and together they are.
    """
    if not cache:
        return None
    sizes = [expert_bytes(batch) for batch in batches]
    if min(sizes) > 2 * cache:
        return True
    experts = torch.cat([active_experts(batch) for batch in batches])
    return bool(experts.unique().numel() == experts.numel()) and sum(sizes) > 2 * cache


def router_logits(case: Case, generator: torch.Generator) -> Tensor:
    """Logits [T, experts that topk_ids count] whose top-k is a draw of k experts without replacement.

    Expert number i of a random order has odds 1 with "uniform" routing and 1 / i with "zipf" (Gumbel's trick: the largest of
    log odds plus Gumbel noise).
    """
    num_experts = case.num_global_experts or case.num_experts
    device = generator.device
    noise = torch.rand(case.num_tokens, num_experts, generator=generator, device=device).clamp(min=1e-20)
    logits = -(-noise.log()).clamp(min=1e-20).log()
    if case.experts == "zipf":
        order = torch.rand(num_experts, generator=generator, device=device).argsort()
        logits -= (1.0 + torch.arange(num_experts, device=device)).log()[order]
    return logits


def token_slots(case: Case, generator: torch.Generator, index: int) -> Tensor:
    """Adapter slot of each token, [T] int32, none without; set number `index` of "one" uses a slot of its own."""
    requests = case.num_tokens if case.num_tokens <= FEW_TOKENS else -(-case.num_tokens // REQUEST_TOKENS)
    device = generator.device
    if case.adapters == "one":
        slots = torch.full((requests,), index % case.max_loras, device=device)
    elif case.adapters == "distinct":
        slots = (torch.arange(requests, device=device) + index) % case.max_loras
    elif case.adapters == "zipf":
        odds = 1 / torch.arange(1, case.max_loras + 1, device=device)
        slots = odds.multinomial(requests, replacement=True, generator=generator)
    else:
        slots = torch.randint(0, case.max_loras, (requests,), generator=generator, device=device)
    of_tokens: Tensor = slots.int().repeat_interleave(-(-case.num_tokens // requests))[: case.num_tokens]
    return of_tokens


def pair_experts(batch: Inputs) -> Tensor:
    """Local expert of each pair, [P] int64, -1 none."""
    return reference.pair_experts(batch.topk_ids, batch.case.num_experts, batch.expert_map)


def active_experts(batch: Inputs) -> Tensor:
    """Local experts that the batch needs, each once."""
    experts = pair_experts(batch)
    active: Tensor = experts[experts >= 0].unique()
    return active


def expert_bytes(batch: Inputs) -> int:
    """Bytes of the base weights that the batch needs."""
    return active_experts(batch).numel() * sum(w[0].numel() * w.element_size() for w in (batch.w13, batch.w2))


def idle(batch: Inputs) -> Inputs:
    """The batch with no token on an adapter."""
    return batch.replace(token_lora_mapping=torch.full_like(batch.token_lora_mapping, -1))


def unloaded(batch: Inputs) -> Inputs:
    """The batch with a pool into which nothing is loaded: rank 0 and disabled, as LoraPool leaves an empty slot."""
    nothing = torch.zeros(batch.case.max_loras, dtype=torch.int32, device=batch.w13.device)
    return batch.replace(lora_ranks=nothing, adapter_enabled=nothing)


def compacted(weights: Inputs, rank: int) -> dict[str, Any]:
    """The adapters in a pool of rank `rank`, the largest of theirs: changes for `Inputs.replace`."""
    case = weights.case
    slots, experts, _, in_features = weights.lora_a13.shape
    a13 = weights.lora_a13.view(slots, experts, case.num_slices, case.max_lora_rank, in_features)[:, :, :, :rank]
    return {
        "lora_a13": a13.reshape(slots, experts, case.num_slices * rank, in_features),
        "lora_b13": weights.lora_b13[..., :rank].contiguous(),
        "lora_a2": weights.lora_a2[:, :, :rank].contiguous(),
        "lora_b2": weights.lora_b2[..., :rank].contiguous(),
    }


def some_rows(batch: Inputs, most: int) -> tuple[Tensor, Inputs]:
    """At most `most` random tokens of a batch, the first and the last among them: their indices, and the batch of them."""
    num_tokens = batch.case.num_tokens
    if num_tokens <= most:
        rows = torch.arange(num_tokens)
    else:
        rows = torch.randperm(num_tokens - 2, generator=torch.Generator().manual_seed(0))[: most - 2] + 1
        rows = torch.cat([torch.tensor([0]), rows, torch.tensor([num_tokens - 1])])
    rows = rows.to(batch.w13.device)
    of_tokens = ("hidden_states", "topk_weights", "topk_ids", "token_lora_mapping")
    part = dataclasses.replace(batch, **{name: getattr(batch, name)[rows] for name in of_tokens})
    return rows, part.replace(case=batch.case.like(num_tokens=len(rows)))


def _randn(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)
