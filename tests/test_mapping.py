"""`token_lora_mapping`: segments of requests to per-token slots."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from moelora_ops import token_lora_mapping


def by_loop(ends: list[int], lora_ids: list[int], num_tokens: int) -> list[int]:
    mapping = [-1] * num_tokens
    for lora_id, start, end in zip(lora_ids, ends, ends[1:]):
        for token in range(start, min(end, num_tokens)):
            mapping[token] = max(lora_id, -1)
    return mapping


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.lists(st.integers(-3, 9), min_size=8, max_size=8),
    st.integers(0, 40),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([torch.int32, torch.int64]),
)
@settings(max_examples=200, deadline=None)
def test_each_token_gets_the_slot_of_its_segment(
    steps: list[int], lora_ids: list[int], num_tokens: int, indptr_dtype: torch.dtype, ids_dtype: torch.dtype
) -> None:
    """Empty segments hold no token; tokens before the first, past the last, or in a negative slot get -1."""
    ends = torch.tensor(steps).cumsum(0).tolist()
    lora_ids = lora_ids[: len(ends) - 1]
    got = token_lora_mapping(torch.tensor(ends, dtype=indptr_dtype), torch.tensor(lora_ids, dtype=ids_dtype), num_tokens)
    assert got.dtype == torch.int32
    assert got.tolist() == by_loop(ends, lora_ids, num_tokens)


def test_tokens_beyond_the_last_segment_have_no_adapter() -> None:
    """sglang 26488: T > seg_indptr[-1]; sglang 29157: a static batch of 8 with 3 live tokens."""
    got = token_lora_mapping(torch.tensor([0, 3]), torch.tensor([0]), 8)
    assert got.tolist() == [0, 0, 0, -1, -1, -1, -1, -1]


def test_no_segment() -> None:
    """N = 0: nobody has an adapter."""
    assert token_lora_mapping(torch.tensor([2]), torch.tensor([], dtype=torch.int32), 4).tolist() == [-1] * 4


def test_an_id_past_int32_does_not_wrap_into_a_slot() -> None:
    """2**32 cut to 32 bits would be slot 0."""
    assert token_lora_mapping(torch.tensor([0, 1, 2]), torch.tensor([2**32, -(2**40)]), 2).tolist() == [-1, -1]


def test_compiles_whole_and_once_for_all_values() -> None:
    """fullgraph, two compiles over all sizes (one static, one dynamic), none for other values."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(token_lora_mapping, fullgraph=True, backend=counter)
    for num_tokens in (5, 8, 13, 1, 40):
        for lora_ids in ([1, -1, 3], [0, 0, 2]):
            args = (torch.tensor([1, 3, 3, 9]), torch.tensor(lora_ids), num_tokens)
            assert compiled(*args).tolist() == token_lora_mapping(*args).tolist()
    assert counter.frame_count <= 3  # 5, dynamic, and torch's own special case of size 1


@pytest.mark.parametrize(
    ("error", "name", "args"),
    [
        (ValueError, "lora_ids dim 0", (torch.tensor([0, 1, 2]), torch.tensor([1]), 3)),
        (ValueError, "seg_indptr", (torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64), 3)),
        (ValueError, "seg_indptr", (torch.tensor([[0, 1]]), torch.tensor([1]), 3)),
        (TypeError, "seg_indptr", (torch.tensor([0.0, 1.0]), torch.tensor([1]), 3)),
        (TypeError, "lora_ids", (torch.tensor([0, 1]), torch.tensor([1.0]), 3)),
        (TypeError, "lora_ids", (torch.tensor([0, 1]), [1], 3)),
        (ValueError, "num_tokens", (torch.tensor([0, 1]), torch.tensor([1]), -1)),
        (TypeError, "num_tokens", (torch.tensor([0, 1]), torch.tensor([1]), 2.0)),
    ],
)
def test_bad_input_is_named(error: type[Exception], name: str, args: tuple[object, ...]) -> None:
    """The error's first words are the argument to blame."""
    with pytest.raises(error, match=f"^{name}"):
        token_lora_mapping(*args)  # type: ignore[arg-type]
