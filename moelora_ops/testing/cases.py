"""Inputs of the three ops, by name: shared by tests and benchmarks.

A `Case` is sizes, popularity and options as data; `make` turns it into tensors. Values are signed, gate and up have A's of
their own, and every adapter's delta is as large as the base, hundreds of bf16 quanta.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One expert layer with adapters. The defaults are small, so that each case shows only what is special about it."""

    name: str
    num_tokens: int = 13
    num_experts: int = 8  # local ones
    top_k: int = 2
    hidden_size: int = 48
    intermediate_size: int = 40
    max_loras: int = 3
    max_lora_rank: int = 16
    dtype: torch.dtype = torch.float32
    experts: str = "uniform"  # one: all tokens choose the same; idle: nobody chooses expert 0; zipf; uniform
    adapters: str = "mixed"  # none; one: all slot 0; distinct: token t has slot t % L; zipf; uniform; mixed: uniform with -1
    ranks: tuple[int, ...] = ()  # of each slot; () is the full rank everywhere and no lora_ranks
    disabled: tuple[int, ...] | None = None  # slots switched off by adapter_enabled; None: no such tensor
    shared_outer: bool = False  # one A13 and one B2 for all experts
    num_global_experts: int = 0  # > 0: topk_ids are global and an expert_map gives the local ones
    stray_ids: bool = False  # some expert and slot ids are out of range, which means none
    strided: bool = False  # every tensor is a view into a larger one full of NaN
    ids_dtype: torch.dtype = torch.int32
    bias: bool = False
    activation: str = "silu"
    gated: bool = True
    interleaved: bool = False
    swiglu_alpha: float = 1.702
    swiglu_limit: float | None = None
    apply_router_weight_on_input: bool = False
    routed_scaling_factor: float = 1.0

    def __str__(self) -> str:
        return self.name

    def like(self, name: str = "", **changes: Any) -> Case:
        """The case with some fields changed."""
        return dataclasses.replace(self, name=name or self.name, **changes)

    def scaled_down(self) -> Case:
        """The same structure at a size for a test on a small CPU: ratios are kept, dimensions are multiples of 8."""
        width = max(self.hidden_size, self.intermediate_size) / 120
        small = {field: max(24, round(getattr(self, field) / width / 8) * 8) for field in ("hidden_size", "intermediate_size")}
        experts = min(self.num_experts, 16)
        return self.like(
            **small,
            num_tokens=min(self.num_tokens, 9),
            num_experts=experts,
            num_global_experts=min(self.num_global_experts, 4 * experts),
        )

    @property
    def num_slices(self) -> int:
        return 2 if self.gated else 1

    @property
    def num_pairs(self) -> int:
        return self.num_tokens * self.top_k

    def make(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        """Random inputs, the same for the same device and seed."""
        return _Maker(self, torch.device(device), seed).make()


@dataclass
class Inputs:
    """The tensors of a case under the names of the ops' arguments."""

    case: Case
    hidden_states: Tensor  # [T, H]
    w13: Tensor  # [E, S * I, H]
    w2: Tensor  # [E, H, I]
    topk_weights: Tensor  # [T, K]
    topk_ids: Tensor  # [T, K]
    token_lora_mapping: Tensor  # [T]
    lora_a13: Tensor  # [L, E or 1, S * R, H]
    lora_b13: Tensor  # [L, E, S * I, R]
    lora_a2: Tensor  # [L, E, R, I]
    lora_b2: Tensor  # [L, E or 1, H, R]
    lora_ranks: Tensor | None
    adapter_enabled: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    expert_map: Tensor | None

    def experts(self, *, adapters: bool = True) -> Call:
        """Arguments of `fused_experts_lora`, with or without the adapters."""
        names = ("lora_a13", "lora_b13", "lora_a2", "lora_b2")
        lora = tuple(getattr(self, name) if adapters else None for name in names)
        base = (self.hidden_states, self.w13, self.w2, self.topk_weights, self.topk_ids, self.token_lora_mapping)
        options = (
            *("activation", "gated", "interleaved", "swiglu_alpha", "swiglu_limit"),
            *("apply_router_weight_on_input", "routed_scaling_factor"),
        )
        kwargs = {name: getattr(self, name) for name in ("w13_bias", "w2_bias", "expert_map")}
        kwargs |= {name: getattr(self.case, name) for name in options}
        if adapters:
            kwargs |= {"lora_ranks": self.lora_ranks, "adapter_enabled": self.adapter_enabled}
        return base + lora, kwargs

    def align(self, block_size: int = 16) -> Call:
        """Arguments of `moe_lora_align_block_size`."""
        num_experts = self.case.num_global_experts or self.case.num_experts
        args = (self.topk_ids, self.token_lora_mapping, num_experts, block_size, self.case.max_loras)
        return args, {"adapter_enabled": self.adapter_enabled, "expert_map": self.expert_map}

    def gate_up_lora(self) -> tuple[list[Tensor], list[Tensor]]:
        """(lora_a_stacked, lora_b_stacked) of the first projection, one slice a half; not for interleaved layouts."""
        assert not self.case.interleaved, "a slice of fused_moe_lora is a block of columns"
        slices = self.case.num_slices
        return list(self.lora_a13.chunk(slices, dim=2)), list(self.lora_b13.chunk(slices, dim=2))

    def down_lora(self) -> tuple[list[Tensor], list[Tensor]]:
        """(lora_a_stacked, lora_b_stacked) of the second projection."""
        return [self.lora_a2], [self.lora_b2]

    def replace(self, **changes: Any) -> Inputs:
        return dataclasses.replace(self, **changes)

    def slots(self) -> list[int]:
        """Slot of each token as the contract reads it: -1 for none, out of range or disabled."""
        off = self.case.disabled or ()
        return [l if 0 <= l < self.case.max_loras and l not in off else -1 for l in self.token_lora_mapping.tolist()]

    def local_experts(self) -> list[list[int]]:
        """Local expert of each choice as the contract reads it: -1 for none."""
        table = list(range(self.case.num_experts)) if self.expert_map is None else self.expert_map.tolist()
        local = [[table[e] if 0 <= e < len(table) else -1 for e in row] for row in self.topk_ids.tolist()]
        return [[e if 0 <= e < self.case.num_experts else -1 for e in row] for row in local]

    def poisoned(self) -> Inputs:
        """The same inputs with NaN wherever no result may look: unused slots and experts, rank padding, weights of nothing."""
        experts = self.local_experts()
        used = {e for row in experts for e in row if e >= 0}
        pairs = {(l, e) for l, row in zip(self.slots(), experts) for e in row if l >= 0 and e >= 0}
        ranks = self.case.ranks or (self.case.max_lora_rank,) * self.case.max_loras
        changes: dict[str, Tensor] = {}
        for name in ("w13", "w2", "w13_bias", "w2_bias"):
            weight = getattr(self, name)
            if weight is not None:
                keep = torch.tensor([e in used for e in range(len(weight))], device=weight.device)
                changes[name] = torch.where(keep.view(-1, *[1] * (weight.dim() - 1)), weight, torch.nan)
        for name in ("lora_a13", "lora_b13", "lora_a2", "lora_b2"):
            changes[name] = _keep_read(name, getattr(self, name), pairs, ranks, self.case)
        valid = torch.tensor(experts, device=self.topk_weights.device).reshape(self.topk_weights.shape) >= 0
        changes["topk_weights"] = torch.where(valid, self.topk_weights, torch.nan)
        changes["hidden_states"] = torch.where(valid.any(1, keepdim=True), self.hidden_states, torch.nan)
        if self.case.strided:
            changes = {name: strided(t) for name, t in changes.items()}
        return self.replace(**changes)


def _keep_read(name: str, tensor: Tensor, pairs: set[tuple[int, int]], ranks: tuple[int, ...], case: Case) -> Tensor:
    """A stacked LoRA tensor with NaN for every (slot, expert) outside `pairs` and past each slot's rank."""
    out = torch.full_like(tensor, torch.nan)
    slices = case.num_slices if name == "lora_a13" else 1
    for slot, expert in pairs:
        source, target = (t[slot, expert if t.shape[1] > 1 else 0] for t in (tensor, out))
        if "_b" in name:
            target[:, : ranks[slot]] = source[:, : ranks[slot]]
            continue
        for start in range(0, slices * case.max_lora_rank, case.max_lora_rank):
            target[start : start + ranks[slot]] = source[start : start + ranks[slot]]
    return out


class _Maker:
    def __init__(self, case: Case, device: torch.device, seed: int) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def make(self) -> Inputs:
        c = self.case
        experts, loras, rank, width = c.num_experts, c.max_loras, c.max_lora_rank, c.num_slices * c.intermediate_size
        outer = 1 if c.shared_outer else experts
        scores = self.scores()
        topk_weights, chosen = scores.topk(c.top_k, dim=1)
        inputs = Inputs(
            case=c,
            hidden_states=self.randn(c.num_tokens, c.hidden_size, scale=1.0),
            w13=self.randn(experts, width, c.hidden_size, scale=c.hidden_size**-0.5),
            w2=self.randn(experts, c.hidden_size, c.intermediate_size, scale=c.intermediate_size**-0.5),
            topk_weights=topk_weights.softmax(dim=1),
            topk_ids=self.stray(chosen, len(scores[0]) if c.num_tokens else experts),
            token_lora_mapping=self.stray(self.slots(), loras),
            lora_a13=self.randn(loras, outer, c.num_slices * rank, c.hidden_size, scale=c.hidden_size**-0.5),
            lora_b13=self.randn(loras, experts, width, rank, scale=1.0),
            lora_a2=self.randn(loras, experts, rank, c.intermediate_size, scale=c.intermediate_size**-0.5),
            lora_b2=self.randn(loras, outer, c.hidden_size, rank, scale=1.0),
            lora_ranks=torch.tensor(c.ranks, dtype=torch.int32, device=self.device) if c.ranks else None,
            adapter_enabled=self.enabled(),
            w13_bias=self.randn(experts, width, scale=0.5) if c.bias else None,
            w2_bias=self.randn(experts, c.hidden_size, scale=0.5) if c.bias else None,
            expert_map=self.expert_map(),
        )
        for slot, r in enumerate(c.ranks or (rank,) * loras):  # B A has the base's size, whatever the rank
            inputs.lora_b13[slot].mul_(max(r, 1) ** -0.5)
            inputs.lora_b2[slot].mul_(max(r, 1) ** -0.5)
        if c.strided:
            views = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
            inputs = inputs.replace(**{name: strided(t) for name, t in views.items() if isinstance(t, Tensor)})
        return inputs

    def randn(self, *shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.case.dtype).mul_(scale)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def scores(self) -> Tensor:
        """Router scores [T, experts that topk_ids count]."""
        c = self.case
        scores = 2 * self.rand(c.num_tokens, c.num_global_experts or c.num_experts)
        if c.experts == "one":
            scores[:, : c.top_k] += 4
        elif c.experts == "idle":
            scores[:, 0] -= 4
        elif c.experts == "zipf":
            scores -= torch.arange(1, scores.shape[1] + 1, device=self.device).log()
        return scores

    def slots(self) -> Tensor:
        c = self.case
        if c.max_loras == 0 or c.adapters == "none":
            return torch.full((c.num_tokens,), -1, device=self.device)
        if c.adapters == "one":
            return torch.zeros(c.num_tokens, dtype=torch.int64, device=self.device)
        if c.adapters == "distinct":
            return torch.arange(c.num_tokens, device=self.device) % c.max_loras
        if c.adapters == "zipf":
            share = 1 / torch.arange(1, c.max_loras + 1, device=self.device)
            return (self.rand(c.num_tokens, 1) > (share.cumsum(0) / share.sum())[None, :-1]).sum(1)
        low = -1 if c.adapters == "mixed" else 0
        return torch.randint(low, c.max_loras, (c.num_tokens,), generator=self.generator, device=self.device)

    def stray(self, ids: Tensor, limit: int) -> Tensor:
        """The ids in their dtype; with `stray_ids` every third or so is out of range in one of the ways seen in the field."""
        ids = ids.to(self.case.ids_dtype)
        if self.case.stray_ids and ids.numel():
            wrong = [-1, -2, limit, limit + 5, 2**31 - 1, -(2**31)]
            if ids.dtype == torch.int64:
                wrong += [2**32, 2**32 + 1, -(2**40)]  # valid ids once cut to 32 bits
            pool = torch.tensor(wrong, dtype=ids.dtype, device=ids.device)
            ids = torch.where(self.rand(*ids.shape) < 0.3, pool[(self.rand(*ids.shape) * len(wrong)).long()], ids)
        return ids

    def enabled(self) -> Tensor | None:
        if self.case.disabled is None:
            return None
        on = [slot not in self.case.disabled for slot in range(self.case.max_loras + 1)]  # longer than L is allowed
        return torch.tensor(on, dtype=torch.int32, device=self.device)

    def expert_map(self) -> Tensor | None:
        """Global to local ids: the local experts are a random choice of the global ones, in random order."""
        c = self.case
        if not c.num_global_experts:
            return None
        table = torch.full((c.num_global_experts,), -1, dtype=c.ids_dtype, device=self.device)
        here = self.rand(c.num_global_experts).argsort()[: c.num_experts]
        table[here] = torch.arange(c.num_experts, dtype=c.ids_dtype, device=self.device)
        return table


def strided(tensor: Tensor) -> Tensor:
    """The tensor as a view into a larger one: rows apart from each other, ids (integers) with gaps, NaN or -7 all around."""
    if tensor.numel() == 0:  # nothing lies around it, and torch's own opcheck cannot clone an empty view
        return tensor
    gap = 1 if tensor.is_floating_point() else 2
    shape = [size + 1 for size in tensor.shape]
    shape[-1] = gap * tensor.shape[-1] + 3
    around = tensor.new_full(shape, torch.nan if tensor.is_floating_point() else -7)
    view = around[tuple(slice(0, size) for size in tensor.shape[:-1])][..., 1 : 1 + gap * tensor.shape[-1] : gap]
    return view.copy_(tensor)


CASES = (
    Case("plain"),
    Case("empty", num_tokens=0),
    Case("one-token", num_tokens=1),
    Case("one-expert-of-one", num_experts=1, top_k=1),
    Case("all-tokens-on-one-expert", top_k=1, experts="one"),
    Case("idle-expert", num_experts=3, top_k=2, experts="idle"),
    Case("every-expert-chosen", num_experts=4, top_k=4),
    Case("no-adapter", adapters="none"),
    Case("no-slot", max_loras=0),
    Case("one-slot", max_loras=1),
    Case("all-adapters-distinct", max_loras=13, adapters="distinct"),
    Case("zipf", num_tokens=40, max_loras=8, adapters="zipf", experts="zipf"),
    Case("odd-sizes", num_tokens=7, num_experts=5, top_k=3, hidden_size=37, intermediate_size=19, max_loras=2, max_lora_rank=5),
    Case("rank-8-in-64", max_lora_rank=64, ranks=(8, 64, 3)),
    Case("rank-0-slot", ranks=(0, 16, 1)),
    Case("shared-outer", shared_outer=True, ranks=(4, 16, 8)),
    Case("expert-parallel", num_experts=4, num_global_experts=12, top_k=3),
    Case("stray-ids", num_tokens=30, stray_ids=True, ids_dtype=torch.int64),
    Case("disabled-slot", num_tokens=20, disabled=(1,)),
    Case("strided", strided=True, bias=True, stray_ids=True, disabled=(), num_global_experts=9),
    Case("gpt-oss-like", activation="swigluoai", swiglu_limit=0.7, interleaved=True, bias=True),
    Case("swigluoai-halves", activation="swigluoai", swiglu_alpha=0.6),
    Case("nemotron-like", activation="relu2", gated=False, routed_scaling_factor=2.5),
    Case("llama4-like", top_k=1, apply_router_weight_on_input=True),
    Case("gelu-tanh", activation="gelu_tanh", swiglu_limit=0.5, apply_router_weight_on_input=True),
)

_REAL: dict[str, Any] = dict(max_loras=8, max_lora_rank=16, num_tokens=64, dtype=torch.bfloat16, adapters="uniform")
MODELS = {
    case.name: case.like(**_REAL)
    for case in (
        Case("qwen3-30b-a3b", hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8),
        Case("qwen3-235b-a22b-tp4", hidden_size=4096, intermediate_size=384, num_experts=128, top_k=8),
        Case("mixtral-8x7b", hidden_size=4096, intermediate_size=14336, num_experts=8, top_k=2),
        Case("olmoe-1b-7b", hidden_size=2048, intermediate_size=1024, num_experts=64, top_k=8),
        Case(
            "deepseek-v3-ep8", hidden_size=7168, intermediate_size=2048, num_experts=32, num_global_experts=256, top_k=8,
            routed_scaling_factor=2.5,
        ),
        Case(
            "deepseek-v3-tp8", hidden_size=7168, intermediate_size=256, num_experts=256, top_k=8, routed_scaling_factor=2.5
        ),
        *(
            Case(
                name, hidden_size=2880, intermediate_size=2880, num_experts=experts, top_k=4,
                activation="swigluoai", swiglu_limit=7.0, interleaved=True, bias=True,
            )
            for name, experts in (("gpt-oss-20b", 32), ("gpt-oss-120b", 128))
        ),
        Case(
            "nemotron-3-nano", hidden_size=2688, intermediate_size=1856, num_experts=128, top_k=6,
            activation="relu2", gated=False, routed_scaling_factor=2.5,
        ),
        Case(
            "llama-4-scout", hidden_size=5120, intermediate_size=8192, num_experts=16, top_k=1,
            apply_router_weight_on_input=True,
        ),
    )
}  # fmt: skip
