"""Hypothesis strategies for cases: every argument of the ops combined (imports hypothesis, so only tests import this)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

import torch
from hypothesis import reject
from hypothesis import strategies as st

from .cases import Case
from .oracle import WeakSignal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (8, 16, 19, 24, 33, 40)
RANKS = (1, 2, 3, 4, 5, 8, 12, 16, 20)


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Case:
    """A small layer with any combination of options, popularities, ranks, disabled slots, stray ids and layouts."""
    gated = draw(st.booleans())
    num_experts = draw(st.integers(1, 9))
    max_loras = draw(st.integers(0, 5))
    rank = draw(st.sampled_from(RANKS))
    slots = st.integers(0, max(max_loras - 1, 0))
    some_ranks = st.lists(st.integers(0, rank), min_size=max_loras, max_size=max_loras)
    activations = ["silu", "gelu", "gelu_tanh", "relu2"] + (["swigluoai"] if gated else [])
    return Case(
        "drawn",
        num_tokens=draw(st.integers(0, 18)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(4, num_experts))),
        hidden_size=draw(st.sampled_from(SIZES)),
        intermediate_size=draw(st.sampled_from(SIZES)),
        max_loras=max_loras,
        max_lora_rank=rank,
        dtype=draw(st.sampled_from(dtypes)),
        experts=draw(st.sampled_from(("uniform", "one", "idle", "zipf"))),
        adapters=draw(st.sampled_from(("mixed", "none", "one", "distinct", "zipf", "uniform"))),
        ranks=tuple(draw(some_ranks)) if draw(st.booleans()) else (),
        disabled=tuple(draw(st.lists(slots, max_size=2))) if draw(st.booleans()) else None,
        shared_outer=draw(st.booleans()),
        num_global_experts=draw(st.sampled_from((0, 0, num_experts, 2 * num_experts + 1))),
        stray_ids=draw(st.booleans()),
        strided=draw(st.booleans()),
        ids_dtype=draw(st.sampled_from((torch.int32, torch.int64))),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from(activations)),
        gated=gated,
        interleaved=gated and draw(st.booleans()),
        swiglu_alpha=draw(st.sampled_from((1.702, 0.6))),
        swiglu_limit=draw(st.sampled_from((None, 0.7))),
        apply_router_weight_on_input=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from((1.0, 2.5))),
    )


seeds = st.integers(0, 2**16)


@contextmanager
def judged() -> Iterator[None]:
    """Reject the drawn example if its delta is too small to be judged (hypothesis complains when that is common)."""
    try:
        yield
    except WeakSignal:
        reject()
