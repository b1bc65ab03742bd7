"""What went wrong in other MoE-LoRA code, one test per fault, each with the small input that shows it.

The numbers are those of the issues and pull requests where the fault was seen. Faults that live elsewhere than in an op:

- rsLoRA scaling (vllm 55545; sglang 40835): tests/test_adapter_files.py; misread files: tests/test_adapters.py
- wrong WGMMA results on SM90 (triton 9433, 11781), shared memory over the device's limit (vllm 47209), int32 overflow in
  Triton addresses (sglang 35188; vllm 39585, 53034; axolotl 3865), JIT compiles during serving (vllm 27445, 45631, 49349),
  a host copy at the first use inside a capture, an in-place output on a second stream: tests/gpu, tests/test_triton_aot.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import moelora_ops
from moelora_ops import reference
from moelora_ops.testing.capture import FakeGraph
from moelora_ops.testing.cases import Case, Inputs
from moelora_ops.testing.numerics import TOLERANCES, assert_close
from moelora_ops.testing.oracle import assert_bitwise, assert_delta_close, exact, exact_experts

ops = torch.ops.moelora
FP32 = TOLERANCES[torch.float32]


def layer(inputs: Inputs, *, adapters: bool = True, **changes: Any) -> Tensor:
    args, kwargs = inputs.experts(adapters=adapters)
    result: Tensor = ops.fused_experts_lora(*args, **{**kwargs, **changes})
    return result


def check_layer(inputs: Inputs) -> None:
    expected = exact_experts(inputs), exact_experts(inputs, adapters=False)
    assert_delta_close(layer(inputs), layer(inputs, adapters=False), *expected)


def delta(inputs: Inputs, projection: str, x: Tensor, *, block_size: int = 8, function: Any = None, **options: Any) -> Tensor:
    """The delta alone, on an output of zeros."""
    a, b = inputs.gate_up_lora() if projection == "gate_up" else inputs.down_lora()
    args, kwargs = inputs.align(block_size)
    aligned = ops.moe_lora_align_block_size(*args, **kwargs)
    shape = (*inputs.topk_ids.shape, len(b) * b[0].shape[2])
    output = torch.zeros(shape, dtype=torch.float64 if function else x.dtype)
    call = (output, x, a, b, inputs.topk_weights, *aligned), {"lora_ranks": inputs.lora_ranks, **options}
    if function is None:
        ops.fused_moe_lora(*call[0], **call[1])
    else:
        exact(function, call)
    return output


def check_delta(inputs: Inputs, projection: str, **options: Any) -> Tensor:
    rows, width = inputs.case.num_tokens, inputs.case.hidden_size
    if projection == "down":
        rows, width = inputs.case.num_pairs, inputs.case.intermediate_size
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(7)).to(inputs.case.dtype)
    got = delta(inputs, projection, x, **options)
    want = delta(inputs, projection, x, function=reference.fused_moe_lora, **options)
    assert_close(got, want, TOLERANCES[inputs.case.dtype])
    return got


def with_ids(case: Case, topk_ids: list[list[int]], mapping: list[int]) -> Inputs:
    inputs = case.like(num_tokens=len(mapping), top_k=len(topk_ids[0])).make()
    ids, slots = torch.tensor(topk_ids, dtype=torch.int32), torch.tensor(mapping, dtype=torch.int32)
    return inputs.replace(topk_ids=ids, token_lora_mapping=slots)


# Wrong results


def test_sglang_27274_32241_28564_up_uses_its_own_a() -> None:
    """Gate and up have different A's, and each half of the first projection is right by itself."""
    inputs = Case("halves", adapters="one").make()
    gate_a, up_a = inputs.lora_a13.chunk(2, dim=2)
    assert not torch.allclose(gate_a, up_a)
    x = inputs.hidden_states
    got = delta(inputs, "gate_up", x)
    want = delta(inputs, "gate_up", x, function=reference.fused_moe_lora)
    for half in range(2):
        assert_close(got.chunk(2, -1)[half], want.chunk(2, -1)[half], FP32, what=("gate", "up")[half])
    check_layer(inputs)


@pytest.mark.parametrize("dirt", [float("nan"), 1e3])
def test_sglang_21864_rank_8_in_a_dirty_rank_16_slot(dirt: float) -> None:
    """What an earlier adapter left past r is not read."""
    inputs = Case("dirty", ranks=(8, 8, 8), adapters="uniform").make()
    clean, clean_delta = layer(inputs), delta(inputs, "gate_up", inputs.hidden_states)
    inputs.lora_a13.unflatten(2, (2, 16))[:, :, :, 8:] = dirt
    inputs.lora_a2[:, :, 8:] = dirt
    for b in (inputs.lora_b13, inputs.lora_b2):
        b[..., 8:] = dirt
    assert_bitwise(layer(inputs), clean)
    assert_bitwise(delta(inputs, "gate_up", inputs.hidden_states), clean_delta)
    check_layer(inputs)


def test_sglang_29157_29468_vllm_42008_stale_tail_on_replay() -> None:
    """Captured with 8 tokens, replayed with 3 live ones and -1 behind: slot 0's huge weights reach no idle row."""
    inputs = Case("tail", num_tokens=8, adapters="uniform").make()
    with FakeGraph() as graph:
        captured = layer(inputs)
    inputs.lora_b13[0] = 1e4
    inputs.lora_b2[0] = 1e4
    inputs.token_lora_mapping.copy_(torch.tensor([1, 2, 1, -1, -1, -1, -1, -1]))
    graph.replay()
    assert_bitwise(captured[3:], layer(inputs, adapters=False)[3:])
    assert_close(captured[:3], exact_experts(inputs)[:3], FP32)


@pytest.mark.parametrize("copies", [1, 100])
def test_sglang_24171_23178_expert_minus_one(copies: int) -> None:
    """An expert of -1 is nobody's, not the last expert of the slot before; in few rows and in many."""
    inputs = with_ids(Case("minus-one", max_loras=2), [[3, -1], [-1, 5]] * copies, [0, 1] * copies)
    check_layer(inputs)
    got = check_delta(inputs, "gate_up")
    assert not got[0::2, 1].any() and not got[1::2, 0].any()
    assert got[0::2, 0].any(-1).all() and got[1::2, 1].any(-1).all()


def test_sglang_32703_38578_captured_before_any_adapter() -> None:
    """A graph captured with every token at -1 shows the delta once the mapping is live."""
    inputs = Case("early", num_tokens=8, adapters="none").make()
    with FakeGraph() as graph:
        captured = layer(inputs)
    base = captured.clone()
    inputs.token_lora_mapping.copy_(torch.tensor([0, 1, 2, -1, 0, 1, 2, -1]))
    graph.replay()
    assert_delta_close(captured, base, exact_experts(inputs), exact_experts(inputs, adapters=False))


@pytest.mark.parametrize("max_loras", [1, 4])
def test_vllm_32235_40131_all_slots_and_base_tokens(max_loras: int) -> None:
    """A batch with every adapter and base tokens: L slots and -1 are L + 1 groups, the last adapter is one of them."""
    mapping = [-1, *range(max_loras)] * 3
    inputs = with_ids(Case("mixed", max_loras=max_loras), [[t % 8, (t + 3) % 8] for t in range(len(mapping))], mapping)
    check_layer(inputs)
    got = check_delta(inputs, "down")
    assert got[inputs.token_lora_mapping == max_loras - 1].any(-1).all() and not got[inputs.token_lora_mapping < 0].any()


def test_vllm_30585_rows_are_in_token_order() -> None:
    """Both deltas use pair order, whatever the alignment sorts: permuted tokens give permuted rows."""
    inputs = Case("order", activation="swigluoai", interleaved=True, bias=True, adapters="uniform").make()
    order = torch.arange(13).flip(0)
    names = ("hidden_states", "topk_ids", "topk_weights", "token_lora_mapping")
    permuted = inputs.replace(**{name: getattr(inputs, name)[order] for name in names})
    assert_close(layer(permuted), layer(inputs)[order], FP32)
    x = torch.randn(13, 2, 40)
    assert_close(delta(permuted, "down", x[order].flatten(0, 1)), delta(inputs, "down", x.flatten(0, 1))[order], FP32)


def test_vllm_31931_routing_weight_before_rounding() -> None:
    """257 is no bf16: weighted in fp32 it gives 256, weighted after rounding it would give 255."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    aligned = ops.moe_lora_align_block_size(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 1, 1, 1)
    output, weight = torch.zeros(1, 1, 1, dtype=torch.bfloat16), torch.tensor([[256 / 257]])
    a = torch.tensor([16.0, 1.0]).bfloat16().view(1, 1, 2, 1)
    b = torch.tensor([16.0, 1.0]).bfloat16().view(1, 1, 1, 2)  # B A = 257
    ops.fused_moe_lora(output, one[0, 0], [a], [b], weight, *aligned, mul_routed_weight=True)
    assert output.item() == 256


def test_vllm_45715_rank_dimensions_must_agree() -> None:
    """An A of rank 16 with a B of rank 8 raises, in both float ops."""
    inputs = Case("ranks").make()
    with pytest.raises(ValueError, match=r"lora_b_stacked\[0\] dim 3 \(R\) must be 16 as in lora_a_stacked\[0\], got 8"):
        delta(inputs.replace(lora_b2=inputs.lora_b2[..., :8]), "down", torch.randn(26, 40))
    with pytest.raises(ValueError, match=r"lora_b2 dim 3 \(R\) must be 16 as in lora_b13, got 8"):
        layer(inputs.replace(lora_b2=inputs.lora_b2[..., :8]))


def test_seed_top_k_1_keeps_the_down_delta() -> None:
    """K = 1 and L = 1: the second delta is added like any other."""
    inputs = Case("single", top_k=1, max_loras=1, adapters="one").make()
    inputs = inputs.replace(lora_b13=torch.zeros_like(inputs.lora_b13))
    assert check_delta(inputs, "down").any(-1).all()
    check_layer(inputs)


def test_router_weight_on_the_input_reaches_the_delta_once() -> None:
    """Llama 4: x is weighted before W13 and A13; the down delta is not weighted again. K = 1, w = 0.3."""
    inputs = Case("llama4", top_k=1, apply_router_weight_on_input=True, adapters="one").make()
    inputs.topk_weights.fill_(0.3)
    check_layer(inputs)
    plain = Case("llama4", top_k=1, adapters="one").make()
    weighted = plain.replace(hidden_states=0.3 * plain.hidden_states, topk_weights=torch.ones_like(plain.topk_weights))
    assert_close(layer(inputs), layer(weighted), FP32)


def test_interleaved_layout_with_two_a() -> None:
    """gpt-oss: rows of B alternate gate, up, and each half still has its own A."""
    inputs = Case("zipped", interleaved=True, adapters="one", activation="swigluoai", swiglu_limit=7.0).make()
    check_layer(inputs)
    gate_a, up_a = inputs.lora_a13.chunk(2, dim=2)
    same, right = layer(inputs.replace(lora_a13=torch.cat([gate_a, gate_a], 2))), layer(inputs)
    assert (same - right).square().mean() > 0.05 * (right - layer(inputs, adapters=False)).square().mean()


@pytest.mark.parametrize("block_size", [1, 3, 16, 48, 128])
def test_block_size_is_read_from_the_alignment(block_size: int) -> None:
    """There is no second block size to disagree with: any one works, and shapes that give none raise."""
    inputs = Case("block").make()
    check_delta(inputs, "gate_up", block_size=block_size)
    args, kwargs = inputs.align(16)
    rows, experts, lengths = ops.moe_lora_align_block_size(*args, **kwargs)
    broken = (rows[:, :-1].contiguous(), experts, lengths)
    with pytest.raises(ValueError, match="expert_ids dim 1 must divide sorted_token_ids dim 1"):
        ops.fused_moe_lora(torch.zeros(13, 2, 48), torch.zeros(26, 40), *inputs.down_lora(), inputs.topk_weights, *broken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 6, 70])
def test_vllm_49063_33448_base_requests_do_not_change(num_tokens: int, dtype: torch.dtype) -> None:
    """Rows at -1 have the bits of the op without adapters, beside rows that have one."""
    inputs = Case("base", num_tokens=num_tokens, dtype=dtype, bias=True).make()
    mapping = torch.arange(num_tokens, dtype=torch.int32) % 4 - 1
    got, base = layer(inputs.replace(token_lora_mapping=mapping)), layer(inputs, adapters=False)
    assert_bitwise(got[mapping < 0], base[mapping < 0])
    assert num_tokens == 1 or not torch.equal(got, base)


@pytest.mark.parametrize("which", ["hidden_states", "lora_a_stacked", "lora_b_stacked", "output"])
def test_vllm_42007_45101_no_mixed_dtypes(which: str) -> None:
    """FP8, or any dtype that differs between x, A, B and the output, raises."""
    inputs = Case("mixed-dtypes").make()
    (a, b), aligned = inputs.down_lora(), ops.moe_lora_align_block_size(*inputs.align(8)[0])
    arguments = dict(output=torch.zeros(13, 2, 48), hidden_states=torch.zeros(26, 40), lora_a_stacked=a, lora_b_stacked=b)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float64):
        value = arguments[which]
        changed = [t.to(dtype) for t in value] if isinstance(value, list) else value.to(dtype)
        with pytest.raises(TypeError, match="must have dtype"):
            ops.fused_moe_lora(*{**arguments, which: changed}.values(), inputs.topk_weights, *aligned)


# Crashes, bounds, limits


def test_sglang_40240_expert_ids_out_of_range() -> None:
    """E, E + 5, -1 and -2 are no expert; the token's other choice counts."""
    inputs = with_ids(Case("stray"), [[8, 1], [13, 2], [-1, 3], [-2, 4], [2**31 - 1, 5], [-(2**31), 6]], [0, 1, 2, 0, 1, -1])
    check_layer(inputs)
    for projection in ("gate_up", "down"):
        got = check_delta(inputs, projection)
        assert not got[:, 0].any() and got[:5, 1].any(-1).all()


def test_sglang_26488_tokens_beyond_the_last_segment() -> None:
    """T > seg_indptr[-1]: the tokens behind have no adapter."""
    mapping = moelora_ops.token_lora_mapping(torch.tensor([0, 4, 7]), torch.tensor([1, 2]), 13)
    assert mapping.tolist() == [1] * 4 + [2] * 3 + [-1] * 6
    inputs = Case("segments").make().replace(token_lora_mapping=mapping)
    check_layer(inputs)
    assert_bitwise(layer(inputs)[7:], layer(inputs, adapters=False)[7:])


@pytest.mark.parametrize("num_experts, max_loras", [(41, 25), (1025, 1), (1024, 8), (8192, 1), (2500, 8)])
def test_sglang_24262_no_bucket_limit(num_experts: int, max_loras: int) -> None:
    """L * E = 1025, 8192, 20000: the alignment and both float ops."""
    case = Case("buckets", num_experts=num_experts, max_loras=max_loras, hidden_size=8, intermediate_size=8, max_lora_rank=2)
    inputs = case.make()
    check_layer(inputs)
    check_delta(inputs, "gate_up")


@pytest.mark.parametrize("num_experts", [512, 1024])
def test_vllm_30026_29534_align_with_many_experts(num_experts: int) -> None:
    """E = 512 and 1024 with a full batch, each pair in a block of its own expert."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(200, num_experts, generator=generator).topk(8).indices
    mapping = torch.randint(-1, 2, (200,), generator=generator)
    rows, experts, lengths = ops.moe_lora_align_block_size(ids, mapping, num_experts, 16, 2)
    live = (rows < 1600).nonzero()
    pairs = rows[live[:, 0], live[:, 1]].long()
    assert pairs.sort().values.equal((mapping >= 0).repeat_interleave(8).nonzero().flatten())
    assert ids.flatten()[pairs].equal(experts[live[:, 0], live[:, 1] // 16].long())
    assert mapping.repeat_interleave(8)[pairs].equal(live[:, 0])


@pytest.mark.parametrize("rank", [1, 4, 8, 12, 20, 24, 48, 96, 128, 160, 256])
def test_sglang_24290_vllm_55158_any_rank(rank: int) -> None:
    """No rank is refused, as the pool's rank and as one inside a larger pool."""
    for case in (Case("rank", max_lora_rank=rank), Case("pool", max_lora_rank=256, ranks=(rank, 1, 256))):
        inputs = case.make()
        check_layer(inputs)
        check_delta(inputs, "down")


def test_sglang_35188_vllm_39585_53034_addresses_past_2_to_the_31() -> None:
    """A slot, an expert and an output row more than 2^31 elements into their tensor; the memory between is never touched."""
    inputs = Case("far", num_experts=2, max_loras=2, dtype=torch.bfloat16, adapters="one").make()
    inputs.token_lora_mapping.fill_(1)
    want, want_delta = layer(inputs), delta(inputs, "down", torch.ones(26, 40, dtype=torch.bfloat16))
    far = 2**31 + 64

    def apart(tensor: Tensor, dim: int) -> Tensor:
        """The same values with the two entries of `dim` far apart."""
        strides = list(tensor.stride())
        strides[dim] = far
        view = torch.empty(far + tensor.numel(), dtype=tensor.dtype).as_strided(tensor.shape, strides)
        return view.copy_(tensor)

    for name, dim in (("w13", 0), ("lora_a2", 0), ("lora_b2", 1), ("lora_b13", 0)):
        assert_bitwise(layer(inputs.replace(**{name: apart(getattr(inputs, name), dim)})), want, name)
    a, b = apart(inputs.lora_a2, 0), inputs.lora_b2
    output = apart(torch.zeros(13, 2, 48, dtype=torch.bfloat16), 1)
    aligned = ops.moe_lora_align_block_size(*inputs.align(8)[0])
    ops.fused_moe_lora(output, torch.ones(26, 40, dtype=torch.bfloat16), [a], [b], inputs.topk_weights, *aligned)
    assert_bitwise(output.contiguous(), want_delta)


def test_vllm_27311_padded_size_is_computed_once() -> None:
    """T * K + E * (bs - 1) is no multiple of bs, with two adapters: rows and blocks fit each other and every pair is there."""
    inputs = Case("padded", num_tokens=7, num_experts=6, top_k=3, max_loras=2, adapters="distinct").make()
    args, kwargs = inputs.align(16)
    rows, experts, lengths = ops.moe_lora_align_block_size(*args, **kwargs)
    assert (7 * 3 + 6 * 15) % 16 != 0 and rows.shape == (2, 112) and experts.shape == (2, 7)
    assert sorted(rows[rows < 21].tolist()) == list(range(21))
    check_delta(inputs, "gate_up", block_size=16)


@pytest.mark.parametrize("num_experts", [8, 64, 65, 300])
def test_no_tokens(num_experts: int) -> None:
    """T = 0 with few and with many experts: empty results, no error."""
    inputs = Case("empty", num_tokens=0, num_experts=num_experts, hidden_size=8, intermediate_size=8).make()
    assert layer(inputs).shape == (0, 8)
    assert delta(inputs, "down", torch.zeros(0, 8)).shape == (0, 2, 8)
    args, kwargs = inputs.align(16)
    rows, experts, lengths = ops.moe_lora_align_block_size(*args, **kwargs)
    assert rows.shape == (3, 0) and experts.shape == (3, 0) and lengths.tolist() == [0, 0, 0]


# CUDA graphs and compilation


def test_vllm_40038_40044_compiled_graph_with_changed_inputs() -> None:
    """One fullgraph program, called again with other contents in the same buffers, gives the new result."""
    inputs = Case("piecewise", num_tokens=8).make()
    compiled = torch.compile(lambda: layer(inputs) * 2, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        fresh = Case("piecewise", num_tokens=8).make(seed=seed)
        for name in ("hidden_states", "topk_ids", "topk_weights", "token_lora_mapping", "lora_a13", "lora_b2"):
            getattr(inputs, name).copy_(getattr(fresh, name))
        assert_close(compiled(), 2 * exact_experts(inputs), FP32)


def test_sglang_25779_25781_25783_25788_no_graph_break() -> None:
    """Dynamo sees one graph with the three ops in it, and no reason to break."""

    def program(inputs: Inputs) -> tuple[Tensor, Tensor]:
        return layer(inputs), delta(inputs, "down", inputs.hidden_states[:, :40].repeat(2, 1))

    explained = torch._dynamo.explain(program)(Case("whole").make())
    assert explained.graph_count == 1 and explained.graph_break_count == 0


def test_vllm_28971_interleaved_graphs_own_their_outputs() -> None:
    """Two captured graphs replayed in turns keep apart: no op hides a buffer that it reuses."""
    first, second = Case("first").make(seed=1), Case("second").make(seed=2)
    captured = []
    for inputs in (first, second):
        with FakeGraph() as graph:
            captured.append((graph, layer(inputs), delta(inputs, "gate_up", inputs.hidden_states)))
    want = [(out.clone(), change.clone()) for _, out, change in captured]
    for graph, *_ in (captured[1], captured[0], captured[1]):
        graph.replay()
    for (_, *got), expected in zip(captured, want):
        for result, value in zip(got, expected):
            assert_bitwise(result, value)


def test_sglang_31870_no_output_aliases_an_input() -> None:
    """With one expert per token and weights of one there would be something to alias; the output is memory of its own."""
    inputs = Case("alias", top_k=1).make()
    outputs = [layer(inputs), layer(inputs, adapters=False), *ops.moe_lora_align_block_size(*inputs.align(8)[0])]
    storages = [t.untyped_storage().data_ptr() for t in outputs]
    assert len(set(storages)) == len(storages)
    assert not set(storages) & {t.untyped_storage().data_ptr() for t in vars(inputs).values() if isinstance(t, Tensor)}


def test_peft_3304_adapters_never_recompile() -> None:
    """Swapping an adapter, changing the mapping, a rank or a flag runs the program that is there."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter, inputs = CompileCounterWithBackend("aot_eager"), Case("swap", ranks=(16, 8, 4), disabled=()).make()
    compiled = torch.compile(lambda mapping: layer(inputs.replace(token_lora_mapping=mapping)), fullgraph=True, backend=counter)
    for seed in range(4):
        mapping = torch.randint(-1, 3, (13,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
        inputs.lora_b2[seed % 3].mul_(-0.5)
        inputs.lora_ranks[seed % 3] = 1 + seed
        assert_close(compiled(mapping), layer(inputs.replace(token_lora_mapping=mapping)), FP32)
    assert counter.frame_count == 1
