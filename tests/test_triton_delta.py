"""The Triton kernels of the delta op, under the interpreter, on alignments made by the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from moelora_ops import reference
from moelora_ops.kernels import config
from moelora_ops.kernels.triton import delta
from moelora_ops.testing.cases import CASES, Case, Inputs, strided
from moelora_ops.testing.oracle import assert_bitwise, assert_delta_close, exact

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")

TINY = Case("tiny", num_tokens=5, num_experts=3, hidden_size=24, intermediate_size=20, max_loras=2, ranks=(3, 16))
PROJECTIONS = pytest.mark.parametrize("projection", ["gate_up", "down"])
OFFSET, SLACK = 3, 2  # columns of the output before and after the delta: NaN


class Call:
    """The delta of one projection of a case, on an output whose surplus columns are NaN."""

    def __init__(self, inputs: Inputs, projection: str, *, block_size: int = 4, weighted: bool = False) -> None:
        case, generator = inputs.case, torch.Generator().manual_seed(1)
        a, b = inputs.gate_up_lora() if projection == "gate_up" else inputs.down_lora()
        x = torch.randn(case.num_tokens if projection == "gate_up" else case.num_pairs, a[0].shape[3], generator=generator)
        width = len(b) * b[0].shape[2]
        output = torch.full((case.num_tokens, case.top_k, OFFSET + width + SLACK), torch.nan)
        output[..., OFFSET : OFFSET + width] = torch.randn(case.num_tokens, case.top_k, width, generator=generator)
        args, kwargs = inputs.align(block_size)
        self.table = reference.moe_lora_align_block_size(*args, **kwargs)
        self.output, self.columns = output.to(case.dtype), slice(OFFSET, OFFSET + width)
        self.args = [x.to(case.dtype), a, b, inputs.topk_weights]
        self.tiles: config.Delta | None = None
        self.kwargs: dict[str, Any] = dict(lora_ranks=inputs.lora_ranks, mul_routed_weight=weighted, offset=OFFSET)

    def run(self) -> Tensor:
        output = self.output.clone()
        delta.fused_moe_lora(output, *self.args, *self.table, **self.kwargs, tiles=self.tiles)
        return output

    def check(self, clean: Call | None = None) -> None:
        """The delta of the formula in its columns, the same bits everywhere else. `clean`: the call without poison."""
        got, want = self.run(), self.output.double()
        clean = clean or self
        exact(reference.fused_moe_lora, ((want, *clean.args, *clean.table), clean.kwargs))
        inside = (..., self.columns)
        assert_delta_close(got[inside], self.output[inside], want[inside], self.output[inside].double())
        for slack in (slice(0, OFFSET), slice(self.columns.stop, None)):
            assert_bitwise(got[..., slack], self.output[..., slack], "columns outside the delta")


@pytest.fixture(autouse=True)
def poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """z begins as NaN."""
    new_z = delta.new_z
    monkeypatch.setattr(delta, "new_z", lambda *args: new_z(*args).fill_(torch.nan))


@PROJECTIONS
@pytest.mark.parametrize("case", [c for c in CASES if not c.interleaved], ids=str)
def test_adds_the_delta(case: Case, projection: str) -> None:
    """The formula for each case, with NaN wherever no result may look; untouched rows and columns keep their bits."""
    inputs = case.make()
    weighted = projection == "down"
    Call(inputs.poisoned(), projection, weighted=weighted).check(Call(inputs, projection, weighted=weighted))


@PROJECTIONS
def test_half_precision(projection: str) -> None:
    """fp16 accumulates in fp32. (The interpreter computes bf16 wrongly; tests/gpu has it.)"""
    Call(TINY.like(dtype=torch.float16).make(), projection, weighted=True).check()


@pytest.mark.parametrize("block_size", [1, 3, 16, 33, 64])
def test_block_sizes(block_size: int) -> None:
    """Any block size of the alignment: below, at and above the tile of the kernels."""
    case = TINY.like(num_tokens=24, num_experts=1, top_k=1, max_loras=1, ranks=(), adapters="one")
    Call(case.make(), "down", block_size=block_size).check()


@pytest.mark.parametrize("rank", [1, 12, 24, 96])
def test_ranks(rank: int) -> None:
    """Any rank of pool and adapter, over several rank tiles."""
    case = TINY.like(num_tokens=2, adapters="uniform", max_lora_rank=rank, ranks=(rank, max(rank - 1, 1)))
    Call(case.make(), "gate_up").check()


def test_split_k() -> None:
    """A long K is summed from splits, the same bits every time."""
    call = Call(TINY.like(num_tokens=2, top_k=1, hidden_size=291).make(), "gate_up")
    call.check()
    assert_bitwise(call.run(), call.run())


def test_more_slots_than_one_look_up_holds() -> None:
    """The block of a program is found among any number of slots."""
    Call(TINY.like(num_tokens=4, max_loras=300, ranks=(), adapters="uniform", num_experts=2).make(), "down").check()


@pytest.mark.parametrize("num_slices", [1, 2, 3, 4])
def test_slices(num_slices: int) -> None:
    """Any number of slices, each with tensors of its own, some shared by all experts, some strided."""
    inputs = TINY.like(adapters="uniform").make()
    call = Call(inputs, "down")
    (a,), (b,) = inputs.down_lora()
    scales = [1.0, -0.5, 2.0, 0.25][:num_slices]
    many_a = [a * s if n % 2 else strided((a * s)[:, :1]) for n, s in enumerate(scales)]
    many_b = [strided(b / s) if n % 2 else (b / s)[:, 1:2] for n, s in enumerate(scales)]
    width = b.shape[2]
    output = torch.randn(5, 2, OFFSET + num_slices * width + SLACK)
    call.output, call.columns, call.args[1], call.args[2] = output, slice(OFFSET, OFFSET + num_slices * width), many_a, many_b
    call.check()


def test_stray_ids_in_the_tables() -> None:
    """Pair ids outside [0, P) are padding; blocks whose expert is out of range are skipped; the rest is served."""
    inputs = TINY.like(num_tokens=9, adapters="uniform").make()
    call = Call(inputs, "gate_up")
    sorted_token_ids, expert_ids, _ = call.table
    padding = sorted_token_ids == 18
    wrong = torch.tensor([18, 19, -1, -(2**31), 2**31 - 1], dtype=torch.int32)
    sorted_token_ids[padding] = wrong.repeat(len(sorted_token_ids[padding]))[: int(padding.sum())]
    expert_ids[0, 0], expert_ids[1, 0] = 3, -7
    call.check()


def test_blocks_of_nothing_but_padding() -> None:
    """A table with more blocks than pairs is read to its end."""
    inputs = TINY.like(num_tokens=1, top_k=1, max_loras=1, ranks=(), adapters="one").make()
    call = Call(inputs, "down")
    ids = torch.full((1, 40), 1, dtype=torch.int32)
    ids[0, 38] = 0
    call.table = (ids, torch.full((1, 10), 2, dtype=torch.int32), torch.tensor([40], dtype=torch.int32))
    call.check()
    assert not torch.equal(call.run()[..., call.columns], call.output[..., call.columns])


def test_post_padded_beyond_the_table() -> None:
    """A count beyond the columns, or below zero, reads nothing out of bounds."""
    call = Call(TINY.make(), "down")
    call.table[2][0], call.table[2][1] = 2**31 - 1, -4
    call.check()


def test_experts_shared_by_all() -> None:
    """Where every stacked tensor has one expert, any expert id >= 0 is served."""
    inputs = TINY.like(num_experts=1, top_k=1, adapters="uniform").make()
    call = Call(inputs, "gate_up")
    call.table[1][call.table[1] == 0] = 2**31 - 1
    call.check()
    assert not torch.equal(call.run()[..., call.columns], call.output[..., call.columns])


@pytest.mark.parametrize(
    "tiles",
    [
        config.Delta(config.Shrink(16, 3, 4, 1), 16, 16, 16, expand_tiles=1, expand_warps=4, expand_stages=1),
        config.Delta(config.Shrink(64, 2, 2, 1), 64, 32, 16, expand_tiles=2, expand_warps=4, expand_stages=2),
        config.Delta(config.Shrink(32, 1, 4, 1), 16, 128, 32, expand_tiles=3, expand_warps=8, expand_stages=3),
    ],
)
def test_any_configuration_gives_the_result(tiles: config.Delta) -> None:
    """Tiles of all sizes, and splits of K."""
    call = Call(
        Case("configured", num_tokens=9, num_experts=2, hidden_size=50, intermediate_size=34, max_loras=2).make(),
        "gate_up", block_size=24,
    )  # fmt: skip
    call.tiles = tiles
    call.check()


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("rows", [16, 64])
def test_runs_of_blocks(rows: int, block_size: int) -> None:
    """Blocks of one expert share a tile whichever way their run lies in it: over its end, beside others, A, B, A, stray ids."""
    inputs = TINY.like(num_tokens=30, num_experts=3, top_k=1, max_loras=2, ranks=(), adapters="uniform").make()
    call = Call(inputs, "down", block_size=block_size)
    call.tiles = config.Delta(config.Shrink(16, 1, 4, 1), rows, rows, 16, 1, 4, 1)
    pairs, slots = torch.arange(30).chunk(2), []
    experts = [0] * 5 + [1, 0, 2, 2, 3, -1, 1] + [2] * 3  # 15 blocks; expert 3 does not exist
    for mine in pairs:
        blocks = torch.full((15, block_size), 30)
        blocks[:, 0] = mine  # one pair a block, so the order of the blocks decides
        slots.append(blocks.flatten())
    counts = torch.tensor([15, 13], dtype=torch.int32) * block_size  # the last two blocks of slot 1 are past its count
    call.table = (torch.stack(slots).int(), torch.tensor([experts, experts[::-1]], dtype=torch.int32), counts)
    call.check()
