"""The delta op around a foreign base GEMM: `python3 -m benchmarks.delta [--tune]`.

One row a cell, in microseconds: the alignment, the delta of the first projection (two slices on [T, K, 2 I]), the delta of the
second ([T, K, H]), the three in a row, and the bar: half of what vLLM's LoRA adds over its base in the same cell. CUDA graphs
over 6 distinct inputs (2 above T = 1024), median of 12. Each configuration's values are checked against fp64 first, on some
pairs. `--tune` tries a list of configurations on each delta and prints them, best first.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor

import moelora_ops
from moelora_ops.kernels import config
from moelora_ops.kernels.config import Delta, Shrink
from moelora_ops.kernels.triton import delta
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


def candidates(case: Case, projection: int) -> Iterator[Delta]:
    """Configurations worth a try at this size."""
    two, wide = case.num_pairs, case.max_lora_rank > 16
    if two <= 256:
        for splits, shrink_k in ((8, 128), (4, 128), (2, 128), (4, 256)):
            for block_n, columns, warps in ((128, 1, 4), (64, 1, 2), (256, 1, 4)):
                if projection == 0 or (splits * shrink_k <= 768 and block_n != 64):
                    yield Delta(Shrink(shrink_k, splits, 4, 4), 16, block_n, warps, rows=16, columns=columns, fused=False)
        yield Delta(Shrink(256, 1, 4, 4), 16, 256, 4, rows=16, columns=1, fused=True)
    elif two <= 4096:
        for splits, shrink_k, stages in ((1, 128, 4), (2, 128, 4), (1, 256, 3)):
            for block_n, columns, warps in ((128, 4, 4), (256, 3, 4), (128, 1, 4)):
                yield Delta(Shrink(shrink_k, splits, 4, stages), 16, block_n, warps, rows=16, columns=columns, fused=False)
        yield Delta(Shrink(128, 1, 4, 4), 16, 128, 4, rows=16, columns=1, fused=True)
        yield Delta(Shrink(128, 1, 4, 4), 16, 256, 4, rows=16, columns=1, fused=True)
        yield Delta(Shrink(128, 1, 2, 4), 16, 64 if wide else 128, 2, rows=16, columns=1, fused=True)
    else:
        for block_m, rows, warps, block_n in (
            (16, 16, 4, 128),
            (32, 64, 4, 128),
            (64, 128, 4, 64),
            (64, 128, 4, 128),
            (64, 256, 8, 128),
        ):
            shrink = Shrink(64, 1, warps, 4)
            yield Delta(shrink, block_m, block_n, warps, rows=rows, columns=1, fused=True)
            yield Delta(shrink, block_m, block_n, warps, rows=rows, columns=3, fused=False)
            if block_m == 64:
                yield Delta(shrink, block_m, block_n, warps, rows=rows, columns=12, fused=False)


def tune(batches: list[Call], projection: int) -> Delta:
    """Time every candidate, print them best first, return the best."""
    case, device = batches[0].case, config.describe(torch.device("cuda"))
    a, b = batches[0].projections[projection][2:4]
    problem = config.Problem(case.num_pairs, case.num_experts, a[0].shape[3], b[0].shape[2], len(a), case.dtype)
    valid = [c for c in candidates(case, projection) if config.is_valid(c, problem, device)]

    def compile_one(tiles: Delta) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            batches[0].delta(projection, tiles=tiles)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(compile_one, valid))
    torch.cuda.synchronize()
    times = []
    for tiles in valid:
        batches[0].check(projection, tiles)
        times.append(graph_us(lambda call, tiles=tiles: call.delta(projection, tiles=tiles), batches))
    order = sorted(range(len(valid)), key=times.__getitem__)
    for i in order[:6] + order[-1:]:
        print(f"    projection {projection + 1}: {times[i]:7.1f}  {describe(valid[i])}")
    fused = next((i for i in order if valid[i].fused), None)
    if fused is not None:
        print(f"    projection {projection + 1}: {times[fused]:7.1f}  {describe(valid[fused])}, best of one launch", flush=True)
    return valid[order[0]]


def describe(tiles: Delta) -> str:
    s = tiles.shrink
    return (
        f"K {s.block_k} x {s.splits} splits, {s.num_stages} stages, {s.num_warps} warps; M {tiles.block_m} of {tiles.rows}; "
        f"N {tiles.block_n} x {tiles.columns}, {tiles.num_warps} warps; {'one launch' if tiles.fused else 'two launches'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tune", action="store_true", help="try a list of configurations")
    parser.add_argument("--tokens", type=int, nargs="*", help="only cells of these T")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, block size {BLOCK_SIZE}")
    print("| T | L | r | align | delta 1 | delta 2 | all three | bar | met |\n|" + " --- |" * 9)
    for (num_tokens, max_loras, rank), bar in BARS.items():
        if options.tokens and num_tokens not in options.tokens:
            continue
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
        del batches


if __name__ == "__main__":
    main()
