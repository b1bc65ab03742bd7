"""What an op cannot serve raises by name, the same in eager and under fake tensors, before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

import moelora_ops
from moelora_ops.testing.oracle import assert_bitwise

T, K, E, L, R, H, I, N, S = 5, 2, 4, 3, 4, 8, 6, 7, 2
Arguments = dict[str, Any]


def align_arguments() -> Arguments:
    return dict(
        topk_ids=torch.zeros(T, K, dtype=torch.int32), token_lora_mapping=torch.zeros(T, dtype=torch.int32), num_experts=E,
        block_size=4, max_loras=L, adapter_enabled=torch.ones(L, dtype=torch.int32), expert_map=torch.arange(E),
    )  # fmt: skip


def delta_arguments() -> Arguments:
    return dict(
        output=torch.randn(T, K, 1 + S * N), hidden_states=torch.randn(T, H),
        lora_a_stacked=[torch.randn(L, E, R, H) for _ in range(S)], lora_b_stacked=[torch.randn(L, E, N, R) for _ in range(S)],
        topk_weights=torch.rand(T, K), sorted_token_ids=torch.zeros(L, 20, dtype=torch.int32),
        expert_ids=torch.zeros(L, 5, dtype=torch.int32), num_tokens_post_padded=torch.full((L,), 20, dtype=torch.int32),
        lora_ranks=torch.ones(L, dtype=torch.int32), mul_routed_weight=True, offset=1,
    )  # fmt: skip


def experts_arguments() -> Arguments:
    return dict(
        hidden_states=torch.randn(T, H), w13=torch.randn(E, 2 * I, H), w2=torch.randn(E, H, I), topk_weights=torch.rand(T, K),
        topk_ids=torch.zeros(T, K, dtype=torch.int32), token_lora_mapping=torch.zeros(T, dtype=torch.int64),
        lora_a13=torch.randn(L, E, 2 * R, H), lora_b13=torch.randn(L, E, 2 * I, R), lora_a2=torch.randn(L, E, R, I),
        lora_b2=torch.randn(L, E, H, R), lora_ranks=torch.ones(L, dtype=torch.int32),
        adapter_enabled=torch.ones(L, dtype=torch.bool),
        w13_bias=torch.randn(E, 2 * I), w2_bias=torch.randn(E, H), expert_map=torch.arange(E), activation="silu", gated=True,
        interleaved=False, swiglu_alpha=1.7, swiglu_limit=7.0, apply_router_weight_on_input=False, routed_scaling_factor=1.0,
    )  # fmt: skip


VALID = {
    "moe_lora_align_block_size": align_arguments,
    "fused_moe_lora": delta_arguments,
    "fused_experts_lora": experts_arguments,
}


@dataclass(frozen=True)
class Bad:
    """One change to valid arguments and the error it must raise."""

    op: str
    what: str
    changes: Any  # () -> Arguments
    error: type[Exception]
    message: str
    fake: bool = True  # False: such a tensor has no fake

    def __str__(self) -> str:
        return f"{self.op}: {self.what}"

    def arguments(self) -> Arguments:
        return {**VALID[self.op](), **self.changes()}


def ids(*shape: int, dtype: torch.dtype = torch.int32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def columns_apart(tensor: Tensor) -> Tensor:
    """The same shape with a last stride of 2."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def two(first: Tensor, second: Tensor | None = None) -> list[Tensor]:
    return [first, first.clone() if second is None else second]


ALIGN = [Bad("moe_lora_align_block_size", *row) for row in (
    ("topk_ids 1-D", lambda: dict(topk_ids=ids(T)), ValueError, "topk_ids must be 2-dimensional [T, K], got shape (5,)"),
    ("topk_ids 3-D", lambda: dict(topk_ids=ids(T, K, 1)), ValueError,
     "topk_ids must be 2-dimensional [T, K], got shape (5, 2, 1)"),
    ("topk_ids float", lambda: dict(topk_ids=torch.zeros(T, K)), TypeError,
     "topk_ids must have dtype int32 or int64, got float32"),
    ("topk_ids int16", lambda: dict(topk_ids=ids(T, K, dtype=torch.int16)), TypeError,
     "topk_ids must have dtype int32 or int64, got int16"),
    ("topk_ids None", lambda: dict(topk_ids=None), TypeError, "topk_ids must be a Tensor, got NoneType"),
    ("topk_ids sparse", lambda: dict(topk_ids=ids(T, K).to_sparse()), ValueError,
     "topk_ids must have a strided layout, got torch.sparse_coo", False),
    ("mapping too short", lambda: dict(token_lora_mapping=ids(T - 1)), ValueError,
     "token_lora_mapping dim 0 (T) must be 5 as in topk_ids, got 4"),
    ("mapping 2-D", lambda: dict(token_lora_mapping=ids(T, 1)), ValueError,
     "token_lora_mapping must be 1-dimensional [T], got shape (5, 1)"),
    ("mapping bool", lambda: dict(token_lora_mapping=ids(T, dtype=torch.bool)), TypeError,
     "token_lora_mapping must have dtype int32 or int64, got bool"),
    ("mapping on another device", lambda: dict(token_lora_mapping=ids(T, device="meta")), ValueError,
     "token_lora_mapping must be on cpu like topk_ids, got meta"),
    ("no experts", lambda: dict(num_experts=0), ValueError, "num_experts must be >= 1, got 0"),
    ("negative experts", lambda: dict(num_experts=-3), ValueError, "num_experts must be >= 1, got -3"),
    ("block size 0", lambda: dict(block_size=0), ValueError, "block_size must be >= 1, got 0"),
    ("block size -1", lambda: dict(block_size=-1), ValueError, "block_size must be >= 1, got -1"),
    ("negative slots", lambda: dict(max_loras=-1), ValueError, "max_loras must be >= 0, got -1"),
    ("K > E", lambda: dict(topk_ids=ids(T, E + 1)), ValueError, "topk_ids dim 1 (top_k) must be <= num_experts = 4, got 5"),
    ("too few flags", lambda: dict(adapter_enabled=ids(L - 1)), ValueError, "adapter_enabled must have shape [>= 3], got (2,)"),
    ("2-D flags", lambda: dict(adapter_enabled=ids(L, 1)), ValueError, "adapter_enabled must have shape [>= 3], got (3, 1)"),
    ("int64 flags", lambda: dict(adapter_enabled=ids(L, dtype=torch.int64)), TypeError,
     "adapter_enabled must have dtype int32 or bool, got int64"),
    ("flags on another device", lambda: dict(adapter_enabled=ids(L, device="meta")), ValueError,
     "adapter_enabled must be on cpu like topk_ids, got meta"),
    ("short expert_map", lambda: dict(expert_map=ids(E - 1)), ValueError,
     "expert_map dim 0 (num_experts) must be 4 as in the argument num_experts, got 3"),
    ("long expert_map", lambda: dict(expert_map=ids(E + 1)), ValueError,
     "expert_map dim 0 (num_experts) must be 4 as in the argument num_experts, got 5"),
    ("float expert_map", lambda: dict(expert_map=torch.zeros(E)), TypeError,
     "expert_map must have dtype int32 or int64, got float32"),
    ("expert_map on another device", lambda: dict(expert_map=ids(E, device="meta")), ValueError,
     "expert_map must be on cpu like topk_ids, got meta"),
    ("more pairs than int32", lambda: dict(topk_ids=ids(2**30, 2, device="meta"), token_lora_mapping=ids(2**30, device="meta"),
     adapter_enabled=None, expert_map=None), ValueError,
     "topk_ids must hold at most 2147483647 pairs (int32 pair ids), got 2147483648"),
    ("more keys than 2^30", lambda: dict(max_loras=2**29), ValueError,
     "num_experts * max_loras must be at most 1073741824, got 4 * 536870912"),
    ("experts past int32", lambda: dict(num_experts=2**62, max_loras=0, expert_map=None), ValueError,
     "num_experts must be at most 2147483647, got 4611686018427387904"),
    ("block size past int32", lambda: dict(block_size=2**40), ValueError,
     "block_size must be at most 2147483647, got 1099511627776"),
    ("more padded rows than int32", lambda: dict(block_size=2**30), ValueError,
     "block_size must keep the padded row count within 2147483647, got 1073741824 for 5368709120 rows"),
)]  # fmt: skip

DELTA = [Bad("fused_moe_lora", *row) for row in (
    ("output 2-D", lambda: dict(output=torch.zeros(T, 15)), ValueError,
     "output must be 3-dimensional [T, K, out], got shape (5, 15)"),
    ("output fp64", lambda: dict(output=torch.zeros(T, K, 15).double()), TypeError,
     "output must have dtype float32 or bfloat16 or float16, got float64"),
    ("output columns apart", lambda: dict(output=columns_apart(torch.zeros(T, K, 15))), ValueError,
     "output must be contiguous in its last dimension, got stride 2 (call .contiguous())"),
    ("output expanded", lambda: dict(output=torch.zeros(T, 1, 15).expand(T, K, 15)), ValueError,
     "output must not overlap itself, got shape (5, 2, 15) with strides (15, 0, 1)"),
    ("output rows overlap", lambda: dict(output=torch.zeros(200).as_strided((T, K, 15), (20, 10, 1))), ValueError,
     "output must not overlap itself, got shape (5, 2, 15) with strides (20, 10, 1)"),
    ("output tokens and choices overlap", lambda: dict(output=torch.zeros(200).as_strided((T, K, 15), (15, 15, 1))), ValueError,
     "output must not overlap itself, got shape (5, 2, 15) with strides (15, 15, 1)"),
    ("output too narrow", lambda: dict(output=torch.zeros(T, K, 14)), ValueError,
     "output dim 2 must be >= offset + slices * N = 1 + 2 * 7, got 14"),
    ("output sparse", lambda: dict(output=torch.zeros(T, K, 15).to_sparse()), ValueError,
     "output must have a strided layout, got torch.sparse_coo", False),
    ("offset too large", lambda: dict(offset=2), ValueError, "output dim 2 must be >= offset + slices * N = 2 + 2 * 7, got 15"),
    ("offset negative", lambda: dict(offset=-1), ValueError, "offset must be >= 0, got -1"),
    ("more pairs than int32", lambda: dict(output=torch.empty(2**30, 2, 15, device="meta")), ValueError,
     "output must hold at most 2147483647 pairs (int32 pair ids), got 2147483648"),
    ("hidden_states of other tokens", lambda: dict(hidden_states=torch.randn(T + 1, H)), ValueError,
     "hidden_states dim 0 must be T = 5 or T * K = 10 as in output, got 6"),
    ("hidden_states 3-D", lambda: dict(hidden_states=torch.randn(T, K, H)), ValueError,
     "hidden_states must be 2-dimensional [rows, in], got shape (5, 2, 8)"),
    ("hidden_states of another dtype", lambda: dict(hidden_states=torch.randn(T, H).bfloat16()), TypeError,
     "hidden_states must have dtype float32 like output, got bfloat16"),
    ("hidden_states in FP8", lambda: dict(hidden_states=torch.randn(T, H).to(torch.float8_e4m3fn)), TypeError,
     "hidden_states must have dtype float32 like output, got float8_e4m3fn"),
    ("hidden_states transposed", lambda: dict(hidden_states=torch.randn(H, T).T), ValueError,
     "hidden_states must be contiguous in its last dimension, got stride 5 (call .contiguous())"),
    ("hidden_states on another device", lambda: dict(hidden_states=torch.randn(T, H, device="meta")), ValueError,
     "hidden_states must be on cpu like output, got meta"),
    ("no slices", lambda: dict(lora_a_stacked=[], lora_b_stacked=[]), ValueError,
     "lora_a_stacked and lora_b_stacked must hold the same number (>= 1) of slices, got 0 and 0"),
    ("slice counts differ", lambda: dict(lora_a_stacked=[torch.randn(L, E, R, H)]), ValueError,
     "lora_a_stacked and lora_b_stacked must hold the same number (>= 1) of slices, got 1 and 2"),
    ("A 3-D", lambda: dict(lora_a_stacked=two(torch.randn(L, R, H))), ValueError,
     "lora_a_stacked[0] must be 4-dimensional [L, E|1, R, in], got shape (3, 4, 8)"),
    ("A of another width", lambda: dict(lora_a_stacked=two(torch.randn(L, E, R, H + 1))), ValueError,
     "lora_a_stacked[0] dim 3 (in) must be 8 as in hidden_states, got 9"),
    ("second A has another rank", lambda: dict(lora_a_stacked=two(torch.randn(L, E, R, H), torch.randn(L, E, R + 1, H))),
     ValueError,
     "lora_a_stacked[1] dim 2 (R) must be 4 as in lora_a_stacked[0], got 5"),
    ("A of another dtype", lambda: dict(lora_a_stacked=two(torch.randn(L, E, R, H).half())), TypeError,
     "lora_a_stacked[0] must have dtype float32 like hidden_states, got float16"),
    ("A columns apart", lambda: dict(lora_a_stacked=two(columns_apart(torch.randn(L, E, R, H)))), ValueError,
     "lora_a_stacked[0] must be contiguous in its last dimension, got stride 2 (call .contiguous())"),
    ("second A on another device",
     lambda: dict(lora_a_stacked=two(torch.randn(L, E, R, H), torch.randn(L, E, R, H, device="meta"))),
     ValueError, "lora_a_stacked[1] must be on cpu like hidden_states, got meta"),
    ("A and B of other ranks", lambda: dict(lora_b_stacked=two(torch.randn(L, E, N, R + 1))), ValueError,
     "lora_b_stacked[0] dim 3 (R) must be 4 as in lora_a_stacked[0], got 5"),
    ("B of other slots", lambda: dict(lora_b_stacked=two(torch.randn(L + 1, E, N, R))), ValueError,
     "lora_b_stacked[0] dim 0 (L) must be 3 as in lora_a_stacked[0], got 4"),
    ("B of other experts", lambda: dict(lora_b_stacked=two(torch.randn(L, E + 1, N, R))), ValueError,
     "lora_b_stacked[0] dim 1 (E) must be 4 or 1 as in lora_a_stacked[0], got 5"),
    ("second B of another width", lambda: dict(lora_b_stacked=two(torch.randn(L, E, N, R), torch.randn(L, E, N - 1, R))),
     ValueError,
     "lora_b_stacked[1] dim 2 (N) must be 7 as in lora_b_stacked[0], got 6"),
    ("B transposed", lambda: dict(lora_b_stacked=two(torch.randn(L, E, R, N).mT)), ValueError,
     "lora_b_stacked[0] must be contiguous in its last dimension, got stride 7 (call .contiguous())"),
    ("weights of another shape", lambda: dict(topk_weights=torch.rand(T, K + 1)), ValueError,
     "topk_weights dim 1 (K) must be 2 as in output, got 3"),
    ("weights bf16", lambda: dict(topk_weights=torch.rand(T, K).bfloat16()), TypeError,
     "topk_weights must have dtype float32, got bfloat16"),
    ("weights on another device", lambda: dict(topk_weights=torch.rand(T, K, device="meta")), ValueError,
     "topk_weights must be on cpu like output, got meta"),
    ("sorted ids of other slots", lambda: dict(sorted_token_ids=ids(L + 1, 20)), ValueError,
     "sorted_token_ids dim 0 (L) must be 3 as in lora_a_stacked[0], got 4"),
    ("sorted ids 1-D", lambda: dict(sorted_token_ids=ids(20)), ValueError,
     "sorted_token_ids must be 2-dimensional [L, EM], got shape (20,)"),
    ("sorted ids int64", lambda: dict(sorted_token_ids=ids(L, 20, dtype=torch.int64)), TypeError,
     "sorted_token_ids must have dtype int32, got int64"),
    ("block size no whole number", lambda: dict(expert_ids=ids(L, 6)), ValueError,
     "expert_ids dim 1 must divide sorted_token_ids dim 1 = 20 (their ratio is the block size), got 6"),
    ("no blocks for rows", lambda: dict(expert_ids=ids(L, 0)), ValueError,
     "expert_ids dim 1 must divide sorted_token_ids dim 1 = 20 (their ratio is the block size), got 0"),
    ("more blocks than rows", lambda: dict(expert_ids=ids(L, 40)), ValueError,
     "expert_ids dim 1 must divide sorted_token_ids dim 1 = 20 (their ratio is the block size), got 40"),
    ("expert_ids int64", lambda: dict(expert_ids=ids(L, 5, dtype=torch.int64)), TypeError,
     "expert_ids must have dtype int32, got int64"),
    ("lengths of other slots", lambda: dict(num_tokens_post_padded=ids(L - 1)), ValueError,
     "num_tokens_post_padded dim 0 (L) must be 3 as in lora_a_stacked[0], got 2"),
    ("lengths on another device", lambda: dict(num_tokens_post_padded=ids(L, device="meta")), ValueError,
     "num_tokens_post_padded must be on cpu like output, got meta"),
    ("ranks of other slots", lambda: dict(lora_ranks=ids(L + 2)), ValueError,
     "lora_ranks dim 0 (L) must be 3 as in lora_a_stacked[0], got 5"),
    ("ranks int64", lambda: dict(lora_ranks=ids(L, dtype=torch.int64)), TypeError,
     "lora_ranks must have dtype int32, got int64"),
)]  # fmt: skip

EXPERTS = [Bad("fused_experts_lora", *row) for row in (
    ("hidden_states 3-D", lambda: dict(hidden_states=torch.randn(1, T, H)), ValueError,
     "hidden_states must be 2-dimensional [T, H], got shape (1, 5, 8)"),
    ("hidden_states int", lambda: dict(hidden_states=ids(T, H)), TypeError,
     "hidden_states must have dtype float32 or bfloat16 or float16, got int32"),
    ("hidden_states transposed", lambda: dict(hidden_states=torch.randn(H, T).T), ValueError,
     "hidden_states must be contiguous in its last dimension, got stride 5 (call .contiguous())"),
    ("w13 sparse", lambda: dict(w13=torch.randn(E, 2 * I, H).to_sparse()), ValueError,
     "w13 must have a strided layout, got torch.sparse_coo", False),
    ("w13 of another dtype", lambda: dict(w13=torch.randn(E, 2 * I, H).half()), TypeError,
     "w13 must have dtype float32 like hidden_states, got float16"),
    ("w13 of another width", lambda: dict(w13=torch.randn(E, 2 * I, H + 1)), ValueError,
     "w13 dim 2 (H) must be 8 as in hidden_states, got 9"),
    ("w13 not gated", lambda: dict(w13=torch.randn(E, I, H)), ValueError,
     "w13 dim 1 (S*I) must be 12 as in 2 * dim 2 of w2, got 6"),
    ("w13 gated", lambda: dict(gated=False, activation="relu2"), ValueError,
     "w13 dim 1 (S*I) must be 6 as in 1 * dim 2 of w2, got 12"),
    ("w13 [E, H, 2I]", lambda: dict(w13=torch.randn(E, H, 2 * I).mT), ValueError,
     "w13 must be contiguous in its last dimension, got stride 12 (call .contiguous())"),
    ("w13 on another device", lambda: dict(w13=torch.randn(E, 2 * I, H, device="meta")), ValueError,
     "w13 must be on cpu like hidden_states, got meta"),
    ("w2 of another height", lambda: dict(w2=torch.randn(E, H + 1, I)), ValueError,
     "w2 dim 1 (H) must be 8 as in hidden_states, got 9"),
    ("w2 of other experts", lambda: dict(w13=torch.randn(E + 1, 2 * I, H)), ValueError,
     "w13 dim 0 (E) must be 4 as in w2, got 5"),
    ("w2 2-D", lambda: dict(w2=torch.randn(H, I)), ValueError, "w2 must be 3-dimensional [E, H, I], got shape (8, 6)"),
    ("w13_bias too short", lambda: dict(w13_bias=torch.randn(E, I)), ValueError,
     "w13_bias dim 1 (S*I) must be 12 as in 2 * dim 2 of w2, got 6"),
    ("w13_bias fp16", lambda: dict(w13_bias=torch.randn(E, 2 * I).half()), TypeError,
     "w13_bias must have dtype float32 like hidden_states, got float16"),
    ("w2_bias 1-D", lambda: dict(w2_bias=torch.randn(H)), ValueError, "w2_bias must be 2-dimensional [E, H], got shape (8,)"),
    ("w2_bias on another device", lambda: dict(w2_bias=torch.randn(E, H, device="meta")), ValueError,
     "w2_bias must be on cpu like hidden_states, got meta"),
    ("weights of other tokens", lambda: dict(topk_weights=torch.rand(T + 1, K)), ValueError,
     "topk_weights dim 0 (T) must be 5 as in hidden_states, got 6"),
    ("weights fp64", lambda: dict(topk_weights=torch.rand(T, K).double()), TypeError,
     "topk_weights must have dtype float32, got float64"),
    ("topk_ids of another top_k", lambda: dict(topk_ids=ids(T, K + 1)), ValueError,
     "topk_ids dim 1 (K) must be 2 as in topk_weights, got 3"),
    ("topk_ids float", lambda: dict(topk_ids=torch.zeros(T, K)), TypeError,
     "topk_ids must have dtype int32 or int64, got float32"),
    ("topk_ids on another device", lambda: dict(topk_ids=ids(T, K, device="meta")), ValueError,
     "topk_ids must be on cpu like hidden_states, got meta"),
    ("mapping per pair", lambda: dict(token_lora_mapping=ids(T * K)), ValueError,
     "token_lora_mapping dim 0 (T) must be 5 as in hidden_states, got 10"),
    ("mapping uint8", lambda: dict(token_lora_mapping=ids(T, dtype=torch.uint8)), TypeError,
     "token_lora_mapping must have dtype int32 or int64, got uint8"),
    ("K > E", lambda: dict(topk_ids=ids(T, E + 1), topk_weights=torch.rand(T, E + 1), expert_map=None), ValueError,
     "topk_ids dim 1 (top_k) must be <= the experts of w13 = 4, got 5"),
    ("K > global experts", lambda: dict(expert_map=ids(1)), ValueError,
     "topk_ids dim 1 (top_k) must be <= the length of expert_map = 1, got 2"),
    ("expert_map 2-D", lambda: dict(expert_map=ids(E, 1)), ValueError,
     "expert_map must be 1-dimensional [num_global_experts], got shape (4, 1)"),
    ("expert_map float", lambda: dict(expert_map=torch.zeros(E)), TypeError,
     "expert_map must have dtype int32 or int64, got float32"),
    *((f"{name} missing", lambda name=name: {name: None}, ValueError, f"{name} must be given together with {partner}, got None")
      for name, partner in (("lora_a13", "lora_b13"), ("lora_b13", "lora_a13"), ("lora_a2", "lora_b2"), ("lora_b2",
     "lora_a2"))),
    ("lora_a13 of one half", lambda: dict(lora_a13=torch.randn(L, E, R, H)), ValueError,
     "lora_a13 dim 2 (S*R) must be 8 as in 2 * dim 3 of lora_b13, got 4"),
    ("lora_a13 of other slots", lambda: dict(lora_a13=torch.randn(L + 1, E, 2 * R, H)), ValueError,
     "lora_a13 dim 0 (L) must be 3 as in lora_b13, got 4"),
    ("lora_a13 of other experts", lambda: dict(lora_a13=torch.randn(L, 2, 2 * R, H)), ValueError,
     "lora_a13 dim 1 (E) must be 4 or 1 as in w2, got 2"),
    ("lora_a13 transposed", lambda: dict(lora_a13=torch.randn(L, E, H, 2 * R).mT), ValueError,
     "lora_a13 must be contiguous in its last dimension, got stride 8 (call .contiguous())"),
    ("lora_b13 shared", lambda: dict(lora_b13=torch.randn(L, 1, 2 * I, R)), ValueError,
     "lora_b13 dim 1 (E) must be 4 as in w2, got 1"),
    ("lora_b13 of one half", lambda: dict(lora_b13=torch.randn(L, E, I, R)), ValueError,
     "lora_b13 dim 2 (S*I) must be 12 as in 2 * dim 2 of w2, got 6"),
    ("lora_b13 bf16", lambda: dict(lora_b13=torch.randn(L, E, 2 * I, R).bfloat16()), TypeError,
     "lora_b13 must have dtype float32 like hidden_states, got bfloat16"),
    ("lora_a2 shared", lambda: dict(lora_a2=torch.randn(L, 1, R, I)), ValueError,
     "lora_a2 dim 1 (E) must be 4 as in w2, got 1"),
    ("lora_a2 of another rank", lambda: dict(lora_a2=torch.randn(L, E, R + 1, I)), ValueError,
     "lora_a2 dim 2 (R) must be 4 as in lora_b13, got 5"),
    ("lora_b2 of another height", lambda: dict(lora_b2=torch.randn(L, E, H + 1, R)), ValueError,
     "lora_b2 dim 2 (H) must be 8 as in hidden_states, got 9"),
    ("lora_b2 3-D", lambda: dict(lora_b2=torch.randn(L, H, R)), ValueError,
     "lora_b2 must be 4-dimensional [L, E|1, H, R], got shape (3, 8, 4)"),
    ("lora_b2 on another device", lambda: dict(lora_b2=torch.randn(L, E, H, R, device="meta")), ValueError,
     "lora_b2 must be on cpu like hidden_states, got meta"),
    ("ranks too short", lambda: dict(lora_ranks=ids(L - 1)), ValueError,
     "lora_ranks dim 0 (L) must be 3 as in lora_b13, got 2"),
    ("ranks float", lambda: dict(lora_ranks=torch.ones(L)), TypeError, "lora_ranks must have dtype int32, got float32"),
    ("too few flags", lambda: dict(adapter_enabled=ids(L - 1)), ValueError, "adapter_enabled must have shape [>= 3], got (2,)"),
    ("float flags without adapters", lambda: dict(adapter_enabled=torch.ones(L), lora_ranks=None, **dict.fromkeys(
     ("lora_a13", "lora_b13", "lora_a2", "lora_b2"))), TypeError, "adapter_enabled must have dtype int32 or bool, got float32"),
    ("unknown activation", lambda: dict(activation="tanh"), ValueError,
     "activation must be one of silu, gelu, gelu_tanh, relu2, swigluoai, got 'tanh'"),
    ("swigluoai without up", lambda: dict(gated=False, activation="swigluoai"), ValueError,
     "activation 'swigluoai' needs gated=True (its formula has an up half), got gated=False"),
    ("interleaved without up", lambda: dict(gated=False, interleaved=True), ValueError,
     "interleaved=True needs gated=True (it orders gate and up rows), got gated=False"),
    ("limit 0", lambda: dict(swiglu_limit=0.0), ValueError, "swiglu_limit must be > 0 or None, got 0.0"),
    ("limit NaN", lambda: dict(swiglu_limit=float("nan")), ValueError, "swiglu_limit must be > 0 or None, got nan"),
)]  # fmt: skip

ALL = ALIGN + DELTA + EXPERTS


def error_of(call: Any, arguments: Arguments) -> Exception:
    with pytest.raises(Exception) as caught:
        call(**arguments)
    return caught.value


@pytest.mark.parametrize("op", VALID)
def test_the_unchanged_arguments_are_served(op: str) -> None:
    """So that each row below fails for its one change."""
    getattr(torch.ops.moelora, op)(**VALID[op]())
    with FakeTensorMode() as mode:
        getattr(torch.ops.moelora, op)(**tree_map(lambda t: mode.from_tensor(t) if isinstance(t, Tensor) else t, VALID[op]()))


@pytest.mark.parametrize("bad", ALL, ids=str)
def test_raises_by_name_before_writing(bad: Bad) -> None:
    """The op and the function raise the error of the table, type and text, and leave every tensor as it was."""
    arguments = bad.arguments()
    tensors = [t for t in torch.utils._pytree.tree_leaves(arguments) if isinstance(t, Tensor) and t.device.type == "cpu"]
    before = [t.clone() for t in tensors]
    for call in (getattr(torch.ops.moelora, bad.op), getattr(moelora_ops, bad.op)):
        error = error_of(call, arguments)
        assert (type(error), str(error)) == (bad.error, bad.message)
    for tensor, old in zip(tensors, before):
        if tensor.layout is torch.strided:
            assert_bitwise(tensor, old)


@pytest.mark.parametrize("bad", [b for b in ALL if b.fake], ids=str)
def test_raises_the_same_under_fake_tensors(bad: Bad) -> None:
    """Tracing sees the error that eager would."""
    mode = FakeTensorMode()
    arguments = tree_map(lambda t: mode.from_tensor(t) if isinstance(t, Tensor) else t, bad.arguments())
    with mode:
        error = error_of(getattr(torch.ops.moelora, bad.op), arguments)
    assert (type(error), str(error)) == (bad.error, bad.message)


def test_raises_the_same_when_a_gradient_is_asked_for() -> None:
    """The autograd kernel checks nothing of its own and hides nothing."""
    arguments = experts_arguments() | {"topk_ids": ids(T, K + 1)}
    arguments["hidden_states"].requires_grad_()
    error = error_of(torch.ops.moelora.fused_experts_lora, arguments)
    assert (type(error), str(error)) == (ValueError, "topk_ids dim 1 (K) must be 2 as in topk_weights, got 3")


def test_compile_reports_the_error() -> None:
    """torch.compile fails with the message, not with a wrong graph."""
    arguments = experts_arguments() | {"lora_ranks": ids(L + 1)}
    compiled = torch.compile(lambda **kw: torch.ops.moelora.fused_experts_lora(**kw), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"lora_ranks dim 0 \(L\) must be 3 as in lora_b13, got 4"):
        compiled(**arguments)


def test_wrong_python_types_are_refused_by_the_dispatcher() -> None:
    """A float where the schema has an int never reaches a kernel; torch's own message names the argument."""
    with pytest.raises(RuntimeError, match="Expected a value of type 'int' for argument 'block_size'"):
        torch.ops.moelora.moe_lora_align_block_size(**align_arguments() | {"block_size": 2.5})


def test_other_backends_are_told_so() -> None:
    """A layout without kernels gets an error of ours even if every argument agrees."""
    arguments = {k: v.to_sparse() if isinstance(v, Tensor) else v for k, v in align_arguments().items()}
    assert "must have a strided layout" in str(error_of(torch.ops.moelora.moe_lora_align_block_size, arguments))
