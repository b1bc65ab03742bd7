"""Configurations that may be worth their time for a shape and a batch size, as trials in which every stage is another one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Iterator

import torch

from ..kernels.config import Device, Experts, Gemm, Problem, Shrink, is_valid

MAX_DIRECT_PAIRS = 64

# Per block_m: (block_n, block_k, warps, stages, group_m). Few rows live on bytes in flight, many on reuse of tiles.
_GEMMS = {
    16: [
        (64, 128, 4, 3, 1), (64, 128, 4, 4, 1), (32, 256, 4, 3, 1), (32, 128, 4, 4, 1), (128, 64, 4, 4, 1), (128, 128, 4, 3, 1),
    ],
    32: [(64, 128, 4, 3, 1), (64, 128, 4, 4, 1), (128, 64, 4, 4, 1), (128, 128, 4, 3, 1)],
    64: [(64, 64, 4, 4, 1), (64, 64, 4, 3, 1), (128, 64, 4, 4, 1), (128, 64, 4, 3, 1), (128, 64, 8, 4, 1), (256, 64, 8, 3, 8)],
    128: [(128, 64, 8, 4, 8), (128, 64, 8, 3, 8), (256, 64, 8, 4, 8), (256, 64, 8, 3, 8), (128, 64, 4, 3, 8)],
}  # fmt: skip
_DIRECT = [(64, 128, 4, 3), (64, 128, 4, 4), (32, 128, 4, 4), (32, 128, 4, 6), (32, 256, 4, 3), (64, 256, 4, 3)]
# Per segment_m: (block_k, splits, warps, stages).
_SHRINKS = {
    16: [(128, 1, 2, 4), (256, 1, 2, 3), (128, 1, 4, 4), (64, 1, 2, 4)],
    32: [(128, 1, 4, 4), (128, 1, 4, 3), (128, 1, 2, 4)],
    64: [(64, 1, 4, 4), (128, 1, 4, 3)],
}
_SPLIT = [(128, splits, 2, 4) for splits in (2, 4, 8)]  # of few pairs


def families(rule: Experts, problem: Problem, device: Device) -> list[list[Experts]]:
    """Lists of trials whose stages can be combined with each other, the first trial of each being close to the rule.

    All of them are valid on the device. In 32 bits only the rule is tried: its tiles are small to be exact.
    """
    if problem.dtype == torch.float32:
        return [[rule]]
    found = [_sorted(replace(rule, direct=False), problem)]
    if problem.num_pairs <= MAX_DIRECT_PAIRS and rule.gate_up.block_m == 16:
        found.append(_direct(replace(rule, direct=True)))
    valid = [[trial for trial in dict.fromkeys(trials) if is_valid(trial, problem, device)] for trials in found]
    return [trials for trials in valid if trials]


def _sorted(base: Experts, problem: Problem) -> Iterator[Experts]:
    yield base
    rows = problem.num_pairs / problem.num_experts
    for block_m in _GEMMS:
        if block_m <= max(16, 4 * rows) and block_m >= min(128, rows / 2):  # neither mostly padding nor weights read many times
            yield from _gemm_trials(base, block_m)
    shrinks = [(m, s) for m, shapes in _SHRINKS.items() if m == 16 or m <= rows for s in shapes]
    if problem.num_pairs <= 256:
        shrinks += [(16, s) for s in _SPLIT]
    yield from _shrink_trials(base, shrinks)
    yield from _combine_trials(base)


def _gemm_trials(base: Experts, block_m: int) -> Iterator[Experts]:
    """All tiles for gate_up and all for down, one of each in a trial."""
    tails = (0,) if block_m < 128 else (0, 64)
    shapes = itertools.product(_GEMMS[block_m], (1, 2), tails)
    down = [Gemm(block_m, n, k, w, s, g, True, expand_stages=e, tail_m=tail) for (n, k, w, s, g), e, tail in shapes]
    gate_up = [g for g in down if g.block_n <= 128]  # it has two accumulators
    if block_m == 128:
        gate_up += [replace(g, merged=True) for g in gate_up]
    # Without splits, whose sum costs a GEMM registers and is not for tiles of 64 rows: they have trials of their own.
    base = replace(base, shrink13=replace(base.shrink13, splits=1), shrink2=replace(base.shrink2, splits=1))
    for i in range(max(len(gate_up), len(down))):
        yield replace(base, gate_up=gate_up[i % len(gate_up)], down=down[i % len(down)])


def _direct(base: Experts) -> Iterator[Experts]:
    yield base
    for n, k, warps, stages in _DIRECT:
        gemm = Gemm(16, n, k, warps, stages, 1, True, expand_stages=1)
        yield replace(base, gate_up=gemm, down=gemm)
    plain = Gemm(16, 64, 128, 4, 3, expand_stages=1)  # weights not by the copy engine
    yield replace(base, gate_up=plain, down=plain)
    yield from _shrink_trials(base, [(base.segment_m, shape) for shape in [*_SHRINKS[16], *_SPLIT]])
    yield from _combine_trials(base)


def _shrink_trials(base: Experts, shrinks: list[tuple[int, tuple[int, int, int, int]]]) -> Iterator[Experts]:
    """Both shrinks with the same tiles, the GEMMs as they are."""
    for segment_m, shape in shrinks:
        yield replace(base, segment_m=segment_m, shrink13=Shrink(*shape), shrink2=Shrink(*shape))


def _combine_trials(base: Experts) -> Iterator[Experts]:
    yield from (replace(base, combine_n=n) for n in (256, 512, 1024))
