"""torch.library.opcheck of the three ops: schema, fake, autograd registration and AOT dispatch agree with the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelora_ops.testing.cases import CASES, Call, Case, Inputs
from moelora_ops.testing.strategies import DTYPES, cases, seeds

OPS = torch.ops.moelora
FULL = Case("full", max_lora_rank=4, ranks=(4, 1, 3), disabled=(1,), num_global_experts=11, bias=True, stray_ids=True)
EXPERTS_OPTIONS = ("lora_ranks", "adapter_enabled", "w13_bias", "w2_bias", "expert_map", "lora13", "lora2")
CHEAP = ("test_schema", "test_autograd_registration", "test_faketensor")


def delta_call(inputs: Inputs, projection: str, *, weighted: bool = False, with_ranks: bool = True) -> Call:
    a, b = inputs.gate_up_lora() if projection == "gate_up" else inputs.down_lora()
    if inputs.case.max_loras == 0:  # opcheck's own clone fails on a view of nothing
        a, b = ([t.clone(memory_format=torch.contiguous_format) for t in stack] for stack in (a, b))
    rows = inputs.case.num_tokens if projection == "gate_up" else inputs.case.num_pairs
    args, kwargs = inputs.align(8)
    aligned = OPS.moe_lora_align_block_size(*args, **kwargs)
    output = torch.zeros(inputs.case.num_tokens, inputs.case.top_k, len(b) * b[0].shape[2] + 3, dtype=inputs.case.dtype)
    x = torch.ones(rows, a[0].shape[3], dtype=inputs.case.dtype)
    options: dict[str, Any] = {"mul_routed_weight": weighted, "offset": 2}
    if with_ranks:
        options["lora_ranks"] = inputs.lora_ranks
    return (output, x, a, b, inputs.topk_weights, *aligned), options


def experts_call(inputs: Inputs, absent: tuple[str, ...] = ()) -> Call:
    args, kwargs = inputs.experts()
    x, w13, w2, weights, ids, mapping, a13, b13, a2, b2 = args
    if "lora13" in absent:
        a13 = b13 = None
    if "lora2" in absent:
        a2 = b2 = None
    if "expert_map" in absent:
        ids = ids % 8
    kwargs = {name: value for name, value in kwargs.items() if name not in absent}
    return (x, w13, w2, weights, ids, mapping, a13, b13, a2, b2), kwargs


@pytest.mark.parametrize("absent", [(), ("adapter_enabled",), ("expert_map",), ("adapter_enabled", "expert_map")], ids=str)
def test_align(absent: tuple[str, ...]) -> None:
    """The align op, with each optional argument present and absent."""
    args, kwargs = FULL.make().align(4)
    torch.library.opcheck(OPS.moe_lora_align_block_size.default, args, {k: v for k, v in kwargs.items() if k not in absent})


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("with_ranks", [False, True])
@pytest.mark.parametrize("projection", ["gate_up", "down"])
def test_delta(projection: str, with_ranks: bool, weighted: bool) -> None:
    """The delta op, with each optional argument present and absent, on both projections."""
    args, kwargs = delta_call(FULL.make(), projection, weighted=weighted, with_ranks=with_ranks)
    torch.library.opcheck(OPS.fused_moe_lora.default, args, kwargs)


@pytest.mark.parametrize("absent", [(), *((name,) for name in EXPERTS_OPTIONS), EXPERTS_OPTIONS], ids=str)
def test_experts(absent: tuple[str, ...]) -> None:
    """The layer op, with all optional arguments, without each of them, and with none."""
    args, kwargs = experts_call(FULL.make(), absent)
    torch.library.opcheck(OPS.fused_experts_lora.default, args, kwargs)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    """The float ops in bf16 and fp16."""
    inputs = FULL.like(dtype=dtype).make()
    torch.library.opcheck(OPS.fused_experts_lora.default, *experts_call(inputs))
    torch.library.opcheck(OPS.fused_moe_lora.default, *delta_call(inputs, "down"))


SPECIAL = ("empty", "one-token", "no-slot", "one-expert-of-one", "shared-outer", "strided", "nemotron-like")


@pytest.mark.parametrize("name", SPECIAL)
def test_special_sizes_and_layouts(name: str) -> None:
    """No tokens, one token, no slots, one expert, shared A, views and a layer without a gate."""
    inputs = next(c for c in CASES if c.name == name).make()
    args, kwargs = inputs.align(4)
    torch.library.opcheck(OPS.moe_lora_align_block_size.default, args, kwargs)
    torch.library.opcheck(OPS.fused_experts_lora.default, *experts_call(inputs))
    torch.library.opcheck(OPS.fused_moe_lora.default, *delta_call(inputs, "down"))


@given(cases(), seeds, st.sampled_from(("gate_up", "down")), st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_arguments(case: Case, seed: int, projection: str, weighted: bool) -> None:
    """Schema, autograd registration and fake kernels hold for every combination of arguments."""
    inputs = case.make(seed=seed)
    args, kwargs = inputs.align(16)
    torch.library.opcheck(OPS.moe_lora_align_block_size.default, args, kwargs, test_utils=CHEAP)
    torch.library.opcheck(OPS.fused_experts_lora.default, *inputs.experts(), test_utils=CHEAP)
    if not case.interleaved:
        torch.library.opcheck(OPS.fused_moe_lora.default, *delta_call(inputs, projection, weighted=weighted), test_utils=CHEAP)


def test_tags() -> None:
    """Every op says that it supports PT2 and that strides are kept; none is marked unsafe for CUDA graphs."""
    for name in ("moe_lora_align_block_size", "fused_moe_lora", "fused_experts_lora"):
        tags = getattr(OPS, name).default.tags
        assert torch.Tag.pt2_compliant_tag in tags and torch.Tag.needs_exact_strides in tags
        assert torch.Tag.cudagraph_unsafe not in tags
