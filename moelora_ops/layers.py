"""The expert layer as modules: around anybody's base GEMMs, or around weights of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import reference
from .adapters.pool import PoolLayer
from .checks import ID_DTYPES, Sizes, check_dtype, check_ids, check_positive, check_tensor, holds, short
from .kernels import config
from .meta.fused_experts_lora import check_activation
from .ops import fused_experts_lora, fused_moe_lora, moe_lora_align_block_size

BaseGemm = Callable[[Tensor, Tensor], Tensor]
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class MoeRunner(nn.Module):
    """The expert layer of `fused_experts_lora` around anybody's base GEMMs, with each token's adapter inside.

    base_gate_up -> delta -> activation -> base_down -> delta -> weighted sum over the choices, with one
    routing for both deltas. With two weight tensors it calls the fused op instead.

    Args:
        base_gate_up: w13 (E, S * I, H), or a callable (hidden_states (T, H), topk_ids (T, K)) -> (T, K, S * I): the first
            projection of every pair with its bias, unweighted, dtype of hidden_states, in fresh memory (it is written).
        base_down: w2 (E, H, I), or a callable (activations (T * K, I), topk_ids (T, K)) -> (T, K, H), likewise. Callables get
            topk_ids as `forward` got them (global ids when there is an expert_map); what they return for a pair whose expert
            is out of range is never read into a result.
        num_experts: E, the experts of the base and the pool.
        lora: a layer of a `LoraPool`, or None. One with slots of both kinds (`LoraPool`) is served here; an op takes one kind.
        activation, gated, interleaved, swiglu_alpha, swiglu_limit, apply_router_weight_on_input, routed_scaling_factor,
            expert_map, w13_bias, w2_bias: as in `fused_experts_lora`; callables add their biases themselves, and with them
            `apply_router_weight_on_input` needs K = 1.
        lora_enabled: False never touches LoRA: neither the alignment nor a delta runs. May be set later.
        block_size: of the alignment.

    Raises: ValueError, TypeError naming the argument, what was expected and what came.
    """

    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    expert_map: Tensor | None
    base_gate_up: BaseGemm | None
    base_down: BaseGemm | None

    def __init__(
        self,
        base_gate_up: Tensor | BaseGemm,
        base_down: Tensor | BaseGemm,
        *,
        num_experts: int,
        lora: PoolLayer | None = None,
        activation: str = "silu",
        gated: bool = True,
        interleaved: bool = False,
        swiglu_alpha: float = 1.702,
        swiglu_limit: float | None = None,
        apply_router_weight_on_input: bool = False,
        routed_scaling_factor: float = 1.0,
        expert_map: Tensor | None = None,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        lora_enabled: bool = True,
        block_size: int = 16,
    ) -> None:
        super().__init__()
        check_positive("num_experts", num_experts)
        check_positive("block_size", block_size)
        check_activation(activation, gated, interleaved, swiglu_limit)
        if expert_map is not None:
            check_tensor("expert_map", expert_map)
            check_dtype("expert_map", expert_map, ID_DTYPES)
            Sizes().bind("expert_map", expert_map, "num_global_experts")
        if lora is not None and not isinstance(lora, PoolLayer):
            raise TypeError(f"lora must be a PoolLayer (pool.layer(i)) or None, got {type(lora).__name__}")
        if lora is not None and lora.lora_b13.shape[1] != num_experts:
            raise ValueError(f"lora must hold num_experts = {num_experts} experts, got {lora.lora_b13.shape[1]}")
        if lora is not None and lora.interleaved != interleaved:
            raise ValueError(f"lora must be of a pool with interleaved={interleaved} like the runner, got {lora.interleaved}")
        self.num_experts, self.lora, self.lora_enabled, self.block_size = num_experts, lora, lora_enabled, block_size
        self.activation, self.gated, self.interleaved = activation, gated, interleaved
        self.swiglu_alpha, self.swiglu_limit = swiglu_alpha, swiglu_limit
        self.apply_router_weight_on_input, self.routed_scaling_factor = apply_router_weight_on_input, routed_scaling_factor
        self.base_gate_up = self.base_down = None
        self._set_tensor("expert_map", expert_map)
        if isinstance(base_gate_up, Tensor) and isinstance(base_down, Tensor):
            sizes = Sizes()
            sizes.set("E", num_experts, "num_experts")
            sizes.bind("base_gate_up", base_gate_up, "E", "S*I", "H")
            sizes.bind("base_down", base_down, "E", "H", "I")
            for name, tensor in (("w13", base_gate_up), ("w2", base_down), ("w13_bias", w13_bias), ("w2_bias", w2_bias)):
                self._set_tensor(name, tensor)
        elif callable(base_gate_up) and callable(base_down):
            for name, tensor in (("w13_bias", w13_bias), ("w2_bias", w2_bias)):
                if tensor is not None:
                    raise ValueError(f"{name} must be None with callables (they add their biases themselves), got a Tensor")
            self.base_gate_up, self.base_down = base_gate_up, base_down
        else:
            kinds = f"{type(base_gate_up).__name__} and {type(base_down).__name__}"
            raise TypeError(f"base_gate_up and base_down must be two weight Tensors or two callables, got {kinds}")

    def _set_tensor(self, name: str, tensor: Tensor | None) -> None:
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(name, tensor)
        else:
            self.register_buffer(name, tensor, persistent=name != "expert_map")

    def forward(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, token_lora_mapping: Tensor | None = None
    ) -> Tensor:
        """Run the layer.

        Args:
            hidden_states: (T, H). topk_weights: (T, K), any float dtype (used in fp32). topk_ids: (T, K) int32 or int64.
            token_lora_mapping: (T,) int32 or int64, -1 none; None: no adapter at all.

        Returns: (T, H), dtype of hidden_states.
        """
        check_tensor("topk_weights", topk_weights)
        check_dtype("topk_weights", topk_weights, _WEIGHT_DTYPES)
        topk_weights = topk_weights.float()
        lora = self.lora if self.lora_enabled and token_lora_mapping is not None else None
        if self.base_gate_up is None:
            return self._fused(hidden_states, topk_weights, topk_ids, token_lora_mapping, lora)
        return self._around_callables(hidden_states, topk_weights, topk_ids, token_lora_mapping, lora)

    @torch.no_grad()
    def warmup(
        self,
        max_tokens: int,
        *,
        top_k: int,
        ids_dtype: torch.dtype = torch.int32,
        mapping_dtype: torch.dtype = torch.int32,
    ) -> list[int]:
        """Compile every kernel that batches of 1 to max_tokens tokens need, with adapters and without.

        It runs the layer on zeros, on the current stream, once for each of the few configurations that these batches have (with
        callables: these too). Then no batch compiles anything, whatever adapters are loaded. Layers of the same sizes,
        types and options share their kernels: one of them is enough. Where nothing is compiled (CPU) it does nothing.

        Args:
            max_tokens: the largest batch. top_k: K. ids_dtype, mapping_dtype: of topk_ids and of token_lora_mapping.

        Returns: the numbers of tokens that it ran.
        Raises: ValueError, TypeError naming the argument, what was expected and what came.
        """
        check_positive("max_tokens", max_tokens)
        check_positive("top_k", top_k)
        for name, dtype in (("ids_dtype", ids_dtype), ("mapping_dtype", mapping_dtype)):
            if dtype not in ID_DTYPES:
                raise TypeError(f"{name} must be {short(ID_DTYPES)}, got {dtype}")
        num_ids = self.num_experts if self.expert_map is None else self.expert_map.shape[0]
        if top_k > num_ids:
            raise ValueError(f"top_k must be <= the number of experts, {num_ids}, got {top_k}")
        fused = self.base_gate_up is None
        if not fused and self.lora is None:
            return []  # all kernels are the callables' own
        like = self.w2 if self.lora is None else self.lora.lora_b2
        if not _compiles(like.device):
            return []
        run = self._fused if fused else self._around_callables
        sizes = config.first_sizes(lambda t: self._configurations(t * top_k, like), max_tokens)
        for num_tokens in reversed(sizes):  # the largest first: the allocator grows once
            x = like.new_zeros(num_tokens, like.shape[-2])
            weights = torch.full((num_tokens, top_k), 1 / top_k, device=like.device)
            ids = (torch.arange(num_tokens * top_k, device=like.device) % num_ids).view(num_tokens, top_k).to(ids_dtype)
            mapping = torch.zeros(num_tokens, dtype=mapping_dtype, device=like.device)
            for lora in (None,) if self.lora is None else (None, self.lora):
                run(x, weights, ids, mapping, lora)
        return sizes

    def _configurations(self, num_pairs: int, like: Tensor) -> tuple[Any, ...]:
        """What the kernels of a batch are compiled for."""
        device, slices, hidden = config.describe(like.device), 2 if self.gated else 1, like.shape[-2]
        if self.base_gate_up is None:
            problem = config.Problem(num_pairs, self.num_experts, hidden, self.w2.shape[2], slices, like.dtype)
            return (config.experts(problem, device),)
        assert self.lora is not None, "without adapters the runner has no kernels"
        inner = self.lora.lora_a2.shape[3]
        up = config.Problem(num_pairs, self.num_experts, hidden, inner, slices, like.dtype)
        down = config.Problem(num_pairs, self.num_experts, inner, hidden, 1, like.dtype)
        return config.delta(up, device), config.delta(down, device)

    def _fused(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, mapping: Tensor | None, lora: PoolLayer | None
    ) -> Tensor:
        if mapping is None:
            mapping = topk_ids.new_full(topk_ids.shape[:1], -1)
        if lora is not None and lora.shared_outer is not None:
            # An op has one stride per tensor: it cannot read a row for each expert of some slots and one row of others. So each
            # kind of slots runs on its own tokens; a pair whose expert is -1 costs no product.
            sizes = Sizes()
            check_tensor("hidden_states", x)
            check_ids(sizes, "topk_ids", topk_ids, ("T", "K"), "hidden_states", x)
            check_ids(sizes, "token_lora_mapping", mapping, ("T",), "hidden_states", x)
            first, last = dataclasses.replace(lora, shared_outer=None), lora.shared_outer
            num_first, num_last = first.lora_b13.shape[0], last.lora_b13.shape[0]
            is_last = ((mapping >= num_first) & (mapping < num_first + num_last)).unsqueeze(-1)
            y_first = self._fused(x, topk_weights, torch.where(is_last, -1, topk_ids), mapping, first)
            y_last = self._fused(x, topk_weights, torch.where(is_last, topk_ids, -1), mapping - num_first, last)
            return torch.where(is_last, y_last, y_first)
        adapters = (None,) * 4 if lora is None else (lora.lora_a13, lora.lora_b13, lora.lora_a2, lora.lora_b2)
        return fused_experts_lora(
            x, self.w13, self.w2, topk_weights, topk_ids, mapping, *adapters,
            lora_ranks=None if lora is None else lora.lora_ranks,
            adapter_enabled=None if lora is None else lora.adapter_enabled,
            w13_bias=self.w13_bias, w2_bias=self.w2_bias, expert_map=self.expert_map, activation=self.activation,
            gated=self.gated, interleaved=self.interleaved, swiglu_alpha=self.swiglu_alpha, swiglu_limit=self.swiglu_limit,
            apply_router_weight_on_input=self.apply_router_weight_on_input, routed_scaling_factor=self.routed_scaling_factor,
        )  # fmt: skip

    def _around_callables(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, mapping: Tensor | None, lora: PoolLayer | None
    ) -> Tensor:
        sizes = Sizes()
        check_tensor("hidden_states", x)
        sizes.bind("hidden_states", x, "T", "H")
        check_ids(sizes, "topk_ids", topk_ids, ("T", "K"), "hidden_states", x)
        sizes.bind("topk_weights", topk_weights, "T", "K")
        top_k = topk_ids.shape[1]
        valid = reference.pair_experts(topk_ids, self.num_experts, self.expert_map).view(topk_ids.shape) >= 0
        if self.apply_router_weight_on_input:
            if top_k != 1:
                raise ValueError(f"topk_ids dim 1 must be 1 for apply_router_weight_on_input with callables, got {top_k}")
            weighted = reference.accumulate(x) * topk_weights
            x = weighted.to(x.dtype)  # rounded once; the base and the delta's A read the same input
        slices = 2 if self.gated else 1
        gate_up = self._call_base("base_gate_up", x, topk_ids)
        width = gate_up.shape[2] // slices * slices if lora is None else lora.lora_b13.shape[2]
        self._check_width("base_gate_up", gate_up, width, "S * I")
        if self.interleaved:
            # The delta op writes whole slices: one copy to [gate | up]. Without adapters too: the CPU's activation of strided
            # halves differs in the last bit, and rows without an adapter must not depend on whether others have one.
            gate_up = torch.cat([gate_up[..., 0::2], gate_up[..., 1::2]], dim=-1)
        if lora is not None and mapping is not None:
            routed = self._align(topk_ids, mapping, lora)
            for slots, routing in routed:
                fused_moe_lora(gate_up, x, *self._gate_up_slices(slots), topk_weights, *routing, lora_ranks=slots.lora_ranks)
        h = reference.activate(
            reference.accumulate(gate_up),
            self.activation,
            gated=self.gated,
            interleaved=False,
            alpha=self.swiglu_alpha,
            limit=self.swiglu_limit,
        )
        h = h.to(x.dtype).flatten(0, 1)  # activated in fp32, rounded once

        y = self._call_base("base_down", h, topk_ids)
        self._check_width("base_down", y, x.shape[1], "H")
        if lora is not None and mapping is not None:
            for slots, routing in routed:
                fused_moe_lora(y, h, [slots.lora_a2], [slots.lora_b2], topk_weights, *routing, lora_ranks=slots.lora_ranks)
        y = reference.accumulate(y)  # base plus delta was rounded once per pair; weights and the sum over choices are fp32
        if not self.apply_router_weight_on_input:
            y = y * topk_weights.unsqueeze(-1)
        y = torch.where(valid.unsqueeze(-1), y, 0.0)  # select, not multiply: NaN * 0 is NaN
        return (self.routed_scaling_factor * y.sum(1)).to(x.dtype)

    def _align(self, topk_ids: Tensor, mapping: Tensor, lora: PoolLayer) -> list[tuple[PoolLayer, tuple[Tensor, ...]]]:
        """One routing for both deltas; each kind of slots has its rows of it."""
        kinds = [lora] if lora.shared_outer is None else [lora, lora.shared_outer]
        num_slots = [slots.lora_ranks.shape[0] for slots in kinds]
        routing = moe_lora_align_block_size(
            topk_ids,
            mapping,
            self.num_experts if self.expert_map is None else self.expert_map.shape[0],
            self.block_size,
            sum(num_slots),
            adapter_enabled=lora.adapter_enabled,
            expert_map=self.expert_map,
        )
        return list(zip(kinds, zip(*(rows.split(num_slots) for rows in routing))))

    def _gate_up_slices(self, lora: PoolLayer) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the pool, one A and one B for each slice."""
        if not self.gated:
            return [lora.lora_a13], [lora.lora_b13]
        b = lora.lora_b13
        halves = [b[:, :, 0::2], b[:, :, 1::2]] if self.interleaved else list(b.chunk(2, dim=2))
        return list(lora.lora_a13.chunk(2, dim=2)), halves

    def _call_base(self, name: str, rows: Tensor, topk_ids: Tensor) -> Tensor:
        out: Tensor = getattr(self, name)(rows, topk_ids)
        check_tensor(f"the result of {name}", out)
        check_dtype(f"the result of {name}", out, (rows.dtype,), " like hidden_states")
        if out.dim() != 3 or out.shape[:2] != topk_ids.shape:
            raise ValueError(
                f"the result of {name} must have shape [T, K, out] with {tuple(topk_ids.shape)}, got {tuple(out.shape)}"
            )
        return out

    @staticmethod
    def _check_width(name: str, out: Tensor, width: int, letter: str) -> None:
        if holds(out.shape[2] != width):
            raise ValueError(f"the result of {name} dim 2 ({letter}) must be {width}, got {out.shape[2]}")


class FusedMoEWithLoRA(MoeRunner):
    """The expert layer around base weights and a layer of a `LoraPool`: one fused op.

    Args:
        w13: (E, S * I, H), w2: (E, H, I): become Parameters that need no gradient (given Parameters stay as they are).
        lora: a layer of a `LoraPool`, or None. Its tensors belong to the pool: they are not in the state_dict and do not move
            with the module.
        options: as in `MoeRunner`; num_experts follows from w13.
    """

    def __init__(self, w13: Tensor, w2: Tensor, lora: PoolLayer | None = None, **options: Any) -> None:
        check_tensor("w13", w13)
        check_tensor("w2", w2)
        sizes = Sizes()
        sizes.bind("w13", w13, "E", "S*I", "H")
        sizes.bind("w2", w2, "E", "H", "I")
        super().__init__(_as_parameter(w13), _as_parameter(w2), num_experts=w13.shape[0], lora=lora, **options)


def _compiles(device: torch.device) -> bool:
    """Whether kernels are compiled for a device when they are first called."""
    return device.type == "cuda"


def _as_parameter(tensor: Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
