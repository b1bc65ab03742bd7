"""The delta op around a foreign base GEMM: `python3 -m benchmarks.delta [--tune]`.

One row a cell, in microseconds: the alignment, the delta of the first projection (two slices on [T, K, 2 I]), the delta of the
second ([T, K, H]), the three in a row, and the bar: half of what vLLM's LoRA adds over its base in the same cell. CUDA graphs
over 6 distinct inputs (2 above T = 1024), median of 12. Values are checked against fp64 first, on some pairs.

`--tune` tries lists of tiles for both launches of each delta, compiled in parallel before, and uses the best ones of each; it
prints the times of each launch alone, best first. The two together take less: the expand starts while the shrink ends.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, Iterable, Iterator, Sequence

import torch
from torch import Tensor

import moelora_ops
from moelora_ops.kernels import config
from moelora_ops.kernels.config import Delta, Shrink
from moelora_ops.kernels.triton import delta
from moelora_ops.kernels.triton._launch import current_stream
from moelora_ops.testing.cases import MODELS, Case, Inputs
from moelora_ops.testing.oracle import assert_delta_close
from moelora_ops.testing.timing import graph_us

BLOCK_SIZE = 16
BARS = {  # (T, L, r): microseconds
    (1, 8, 16): 22, (8, 8, 16): 24, (32, 8, 16): 36, (128, 8, 16): 77, (512, 8, 16): 169, (2048, 8, 16): 325,
    (8192, 8, 16): 502, (32, 16, 64): 66, (512, 16, 64): 579,
}  # fmt: skip


@dataclass
class Call:
    """One batch: its routing, and both projections' arguments of the delta op."""

    ids: Tensor
    mapping: Tensor
    case: Case
    projections: tuple[tuple[Any, ...], tuple[Any, ...]]  # (output, x, A, B, weights)
    table: tuple[Tensor, Tensor, Tensor] | None = None

    def align(self) -> tuple[Tensor, Tensor, Tensor]:
        return moelora_ops.moe_lora_align_block_size(
            self.ids, self.mapping, self.case.num_experts, BLOCK_SIZE, self.case.max_loras
        )

    def delta(self, projection: int, table: Any = None, tiles: Delta | None = None) -> None:
        args = (*self.projections[projection], *(table or self.table or self.align()))
        if tiles is None:
            moelora_ops.fused_moe_lora(*args, mul_routed_weight=projection == 1)
        else:
            delta.fused_moe_lora(*args, mul_routed_weight=projection == 1, tiles=tiles)

    def layer(self, tiles: Sequence[Delta | None] = (None, None)) -> None:
        table = self.align()
        for projection in (0, 1):
            self.delta(projection, table, tiles[projection])

    def check(self, projection: int, tiles: Delta | None = None, pairs: int = 48) -> None:
        """The delta of some pairs against fp64."""
        output, x, a, b, weights = self.projections[projection]
        sample = torch.randperm(self.case.num_pairs, device="cuda")[:pairs]
        token, choice = sample // self.case.top_k, sample % self.case.top_k
        before = output.normal_()[token, choice].clone()
        self.delta(projection, tiles=tiles)
        slot, expert = self.mapping.long()[token], self.ids.long()[token, choice]
        rows = x[token if len(x) == self.case.num_tokens else sample].double()[:, :, None]
        parts = [b_s[slot, expert].double() @ (a_s[slot, expert].double() @ rows) for a_s, b_s in zip(a, b)]
        change = torch.cat(parts, dim=1)[..., 0]
        if projection == 1:
            change *= weights[token, choice].double()[:, None]
        assert_delta_close(output[token, choice], before, before.double() + change, before.double())


def calls(num_tokens: int, max_loras: int, rank: int) -> list[Call]:
    """Router: top-k of random logits; a random adapter per token up to T = 512, above that requests of 256 tokens."""
    model = MODELS["qwen3-30b-a3b"].like(num_tokens=1, max_loras=max_loras, max_lora_rank=rank)
    inputs, case = model.make("cuda"), model.like(num_tokens=num_tokens)
    inputs = inputs.replace(w13=inputs.w13[:1], w2=inputs.w2[:1])
    return [_call(case, inputs, seed) for seed in range(6 if num_tokens <= 1024 else 2)]


def _call(case: Case, inputs: Inputs, seed: int) -> Call:
    generator = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=case.dtype)

    scores = torch.randn(case.num_tokens, case.num_experts, generator=generator, device="cuda")
    weights, ids = scores.topk(case.top_k, dim=1)
    weights = weights.softmax(-1) * case.top_k  # about 1: a weighted delta is as large as the base
    requests = case.num_tokens if case.num_tokens <= 512 else -(-case.num_tokens // 256)
    slots = torch.randint(0, case.max_loras, (requests,), generator=generator, device="cuda", dtype=torch.int32)
    mapping = slots.repeat_interleave(-(-case.num_tokens // requests))[: case.num_tokens]
    batch, wide = (case.num_tokens, case.top_k), 2 * case.intermediate_size
    first = (randn(*batch, wide), randn(case.num_tokens, case.hidden_size), *inputs.gate_up_lora(), weights)
    second = (
        randn(*batch, case.hidden_size), randn(case.num_pairs, case.intermediate_size), *inputs.down_lora(), weights
    )  # fmt: skip
    call = Call(ids.int(), mapping, case, (first, second))
    call.table = call.align()
    return call


def shrinks(num_pairs: int) -> Iterator[tuple[Shrink, int]]:
    """Tiles of the shrink worth a try at this size, with their rows; all with the same splits stand together."""
    if num_pairs <= 256:
        for splits in (8, 4) if num_pairs <= 16 else (4, 2) if num_pairs <= 64 else (4, 2, 1):
            yield from ((Shrink(128, splits, 2, 4), 16), (Shrink(256, splits, 4, 3), 16))
    elif num_pairs <= 4096:
        yield from ((Shrink(128, 2, 2, 4), 16), (Shrink(128, 1, 2, 4), 16))
        yield from ((Shrink(256, 1, 4, 3), 16), (Shrink(64, 1, 2, 6), 16))
    else:
        yield from ((Shrink(128, 1, 2, 4), 16), (Shrink(128, 1, 4, 3), 32))
        yield from ((Shrink(64, 1, 4, 4), 64), (Shrink(64, 1, 4, 5), 128))


def expands(num_pairs: int, rank: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Tiles of the expand: rows, columns, how many, warps, stages."""
    if num_pairs <= 256:
        yield from ((16, 64, 1, 2, 1), (16, 128, 1, 4, 1), (16, 64, 4, 2, 4), (16, 64, 8, 4 if rank > 16 else 2, 4))
        yield from ((16, 256, 1, 4, 1), (16, 32, 8, 1, 4)) if rank <= 16 else ((16, 64, 4, 4, 4), (16, 32, 8, 2, 4))
    elif num_pairs <= 4096:
        yield from ((16, 64, 1, 2, 1), (16, 64, 8, 2, 4), (16, 64, 16, 2, 4), (16, 128, 8, 4, 4), (16, 64, 8, 4, 4))
        yield from ((16, 256, 1, 4, 1), (16, 32, 16, 1, 5)) if rank <= 16 else ((16, 64, 4, 4, 3), (16, 32, 16, 2, 4))
    else:
        yield from ((16, 64, 1, 2, 1), (16, 64, 8, 2, 4), (16, 128, 8, 4, 3), (16, 256, 1, 4, 1), (16, 256, 4, 4, 3))
        yield from ((32, 64, 8, 4, 4), (32, 64, 1, 2, 1), (32, 128, 1, 4, 1), (32, 128, 6, 4, 3))
        yield from ((64, 64, 8, 4, 3), (64, 64, 1, 4, 1))


def candidates(case: Case, projection: int) -> list[Delta]:
    """Every shrink, and every expand for every number of splits, in as few configurations as hold them."""
    sizes = (case.hidden_size, case.intermediate_size, 2) if projection == 0 else (case.intermediate_size, case.hidden_size, 1)
    problem = config.Problem(case.num_pairs, case.num_experts, *sizes, case.dtype)
    first = list(shrinks(case.num_pairs))
    found = []
    for splits in sorted({s.splits for s, _ in first}):
        mine = [s for s in first if s[0].splits == splits]
        tiles = list(expands(case.num_pairs, case.max_lora_rank))
        for i in range(max(len(mine), len(tiles))):
            shrink, rows = mine[i % len(mine)]
            found.append(Delta(shrink, rows, *tiles[i % len(tiles)]))
    return [c for c in found if config.is_valid(c, problem, config.describe(torch.device("cuda", 0)))]


def compile_one(job: tuple[Case, int, Delta]) -> None:
    """Compile one configuration into Triton's cache, without memory for its tensors."""
    case, projection, tiles = job

    def empty(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    batch, slots, rank = (case.num_tokens, case.top_k), (case.max_loras, case.num_experts), case.max_lora_rank
    hidden, inner = case.hidden_size, case.intermediate_size
    if projection == 0:
        output, x = empty(*batch, 2 * inner), empty(case.num_tokens, hidden)
        lora = [list(t.chunk(2, 2)) for t in (empty(*slots, 2 * rank, hidden), empty(*slots, 2 * inner, rank))]
    else:
        output, x = empty(*batch, hidden), empty(case.num_pairs, inner)
        lora = [[empty(*slots, rank, inner)], [empty(*slots, hidden, rank)]]
    blocks = case.num_pairs // BLOCK_SIZE + case.num_experts
    shapes = ((case.max_loras, blocks * BLOCK_SIZE), (case.max_loras, blocks), (case.max_loras,))
    table = (empty(*shape, dtype=torch.int32) for shape in shapes)
    weights = empty(*batch, dtype=torch.float32)
    call = delta.prepare(output, x, *lora, weights, *table, mul_routed_weight=projection == 1, tiles=tiles)
    delta.Plan(call, torch.device("cuda", 0))


def compile_all(cells: Iterable[Case], processes: int = 15) -> None:
    """All candidates of all cells, in processes of their own."""
    begin, jobs = time.perf_counter(), {}
    for case in cells:
        for projection in (0, 1):
            for tiles in candidates(case, projection):
                jobs[projection, case.max_loras, case.max_lora_rank, tiles] = (case, projection, tiles)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(compile_one, jobs.values(), chunksize=1)
    print(f"{len(jobs)} configurations compiled in {time.perf_counter() - begin:.0f} s", flush=True)


def tune(batches: list[Call], projection: int) -> Delta:
    """Time each launch of every candidate, print them best first, return the best two with the same splits."""
    found = candidates(batches[0].case, projection)
    for tiles in found:
        batches[0].check(projection, tiles)
    shrink_us: dict[tuple[Shrink, int], float] = {}
    expand_us: dict[tuple[int, tuple[int, ...]], float] = {}
    for tiles in found:
        mine, rest = (tiles.shrink, tiles.shrink_m), (tiles.shrink.splits, astuple(tiles)[2:])
        if mine not in shrink_us:
            shrink_us[mine] = graph_us(partial(launch, projection=projection, tiles=tiles, stage=0), batches)
        if rest not in expand_us:
            expand_us[rest] = graph_us(partial(launch, projection=projection, tiles=tiles, stage=1), batches)
    print(f"  projection {projection + 1}")
    for (s, rows), us in sorted(shrink_us.items(), key=lambda item: item[1])[:4]:
        print(f"    {us:7.1f}  shrink K {s.block_k} x {s.splits} splits, {s.num_warps} warps, {s.num_stages} stages, M {rows}")
    for (splits, (m, n, count, warps, stages)), us in sorted(expand_us.items(), key=lambda item: item[1])[:6]:
        print(f"    {us:7.1f}  expand of {splits} splits, M {m}, N {n} x {count}, {warps} warps, {stages} stages")
    best = min(
        ((us + expand_us[e], s, e) for s, us in shrink_us.items() for e in expand_us if e[0] == s[0].splits),
        key=lambda item: item[0],
    )  # fmt: skip
    (shrink, rows), (_, expand) = best[1:]
    tiles = Delta(shrink, rows, *expand)
    print(f"    {shrink_us[shrink, rows]:.1f} + {expand_us[shrink.splits, expand]:.1f}: {tiles}", flush=True)
    return tiles


def launch(batch: Call, projection: int, tiles: Delta, stage: int) -> None:
    """One of the two launches, on z as it is."""
    call = delta.prepare(*batch.projections[projection], *batch.table, mul_routed_weight=projection == 1, tiles=tiles)
    plan = delta.plan(call)
    (stages,) = plan.stages
    z = delta.new_z(call.output, tiles.shrink.splits, plan.num_pairs, stages[0] * plan.max_rank)
    a, b = call.lora_a, call.lora_b
    table = (call.sorted_token_ids, call.expert_ids, call.num_tokens_post_padded, call.lora_ranks)
    stream = current_stream(call.output.device)
    if stage == 0:
        stages[1](stream, call.hidden_states, z, a[0], a[1] if len(a) == 2 else None, *table, None)
    else:
        stages[2](stream, call.output, z, b[0], b[1] if len(b) == 2 else None, call.topk_weights, *table)


def eager_us(batch: Call, projection: int, repeats: int = 200) -> float:
    """CPU time of one eager call of the op."""
    assert batch.table is not None
    batch.delta(projection)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        batch.delta(projection)
    elapsed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return elapsed / repeats * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tune", action="store_true", help="try a list of configurations")
    parser.add_argument("--tokens", type=int, nargs="*", help="only cells of these T")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, block size {BLOCK_SIZE}")
    cells = {cell: bar for cell, bar in BARS.items() if not options.tokens or cell[0] in options.tokens}
    if options.tune:
        model = MODELS["qwen3-30b-a3b"]
        compile_all(model.like(num_tokens=t, max_loras=max_loras, max_lora_rank=r) for t, max_loras, r in cells)
    print("| T | L | r | align | delta 1 | delta 2 | all three | bar | met |\n|" + " --- |" * 9)
    for (num_tokens, max_loras, rank), bar in cells.items():
        batches = calls(num_tokens, max_loras, rank)
        best: list[Delta | None] = [None, None]
        for projection in (0, 1):
            batches[0].check(projection)
            if options.tune:
                best[projection] = tune(batches, projection)
        align = graph_us(Call.align, batches)
        first, second = (graph_us(lambda call, p=p: call.delta(p, tiles=best[p]), batches) for p in (0, 1))
        total = graph_us(lambda call: call.layer(best), batches)
        times = f"{align:.1f} | {first:.1f} | {second:.1f} | {total:.1f}"
        print(f"| {num_tokens} | {max_loras} | {rank} | {times} | {bar} | {'yes' if total <= bar else 'no'} |", flush=True)
        if num_tokens == 1:
            print(f"CPU time of an eager call: {eager_us(batches[0], 0):.0f} and {eager_us(batches[0], 1):.0f} us")
        del batches


if __name__ == "__main__":
    main()
