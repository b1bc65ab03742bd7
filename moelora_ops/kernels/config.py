"""Tile configurations: frozen data, rules with reasons, one validity predicate, tuned tables beside.

A configuration changes speed, never results (beyond the order in which a tile's products are summed). `experts` and `delta`
look for a tuned table first and fall back to the rules; what is not valid on the device is passed over, down to tiles that fit
any. None of it depends on whether there are adapters, so rows without one have the same bits with and without a pool.

A tuned table is package data, `configs/experts/E=128,H=2048,I=768,S=2,dtype=bfloat16,device=NVIDIA_H200.json`:

    {"8": {"gate_up": {"block_m": 16, ...}, "down": {...}, "shrink13": {...}, "shrink2": {...}, "segment_m": 16, ...}, ...}

Keys are numbers of pairs (T * K); the nearest in the logarithm serves; values are the fields of `Experts` (of `Delta` under
`configs/delta`, where I is N), or null where the rule serves. A table holds a dozen keys at most, and the rules have as few
steps, so the number of compiled variants over all batch sizes is a small constant. `moelora tune` writes tables.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Iterator, TypeVar, get_type_hints

import torch

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass(frozen=True)
class Gemm:
    """Tiles of a base GEMM."""

    block_m: int
    block_n: int  # columns of the output; gate_up has two weight tiles and two accumulators of this width
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 1  # blocks of rows that share a tile of weights while it is in L2
    tma: bool = False  # weights by the copy engine, where strides and addresses allow
    expand_stages: int = 2  # of the loop over rank tiles, four of which are one step
    tail_m: int = 0  # a block of no more rows than this is done with a tile of so many; 0: all with block_m
    merged: bool = False  # gate_up, with `tma`: gate and up in one product of twice the width


@dataclass(frozen=True)
class Shrink:
    """Tiles of a shrink; its rows are `segment_m` or `block_m`, its ranks `block_r(...)`."""

    block_k: int
    splits: int  # of K; the consumer adds the partial sums in order
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Experts:
    """Configuration of one call of `fused_experts_lora`."""

    gate_up: Gemm
    down: Gemm
    shrink13: Shrink
    shrink2: Shrink
    segment_m: int  # rows of a shrink program: pairs of one (expert, adapter)
    combine_n: int  # columns of a combine program
    pdl: bool = True  # programmatic dependent launch, where the device has it
    direct: bool = False  # few pairs: no routing, a block for each pair
    # direct: gate_up sums the second shrink, over each of its tiles of columns, in place of a launch. With blocks of several
    # pairs it loses (H200: T = 8 137 -> 144 us, T = 128 343 -> 363): their rank tiles share dots, their sums are read often.
    fuse_shrink2: bool = False


@dataclass(frozen=True)
class Delta:
    """Configuration of one call of `fused_moe_lora`."""

    shrink: Shrink
    shrink_m: int  # rows of a shrink tile: as many blocks of the alignment as fit, or a part of one
    expand_m: int  # rows of an expand tile, likewise
    expand_n: int  # its columns
    expand_tiles: int  # that one program walks
    expand_warps: int
    expand_stages: int


@dataclass(frozen=True)
class Problem:
    """Sizes that a configuration may depend on: never on what a batch holds, so that capture and replay agree."""

    num_pairs: int
    num_experts: int
    in_features: int  # H of the layer op
    out_features: int  # I of the layer op, N of the delta op
    num_slices: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Device:
    """What a kernel must fit into."""

    name: str
    shared_memory: int  # bytes that one program may use
    wide: bool = True  # accumulators of 128 registers a thread leave room for the rest: from Hopper on


C = TypeVar("C", Experts, Delta, Gemm, Shrink)

INTERPRETER = Device("interpreter", 227 * 1024)


@lru_cache(maxsize=None)
def describe(device: torch.device) -> Device:
    """The device's name and limits; asked once, not on the hot path."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)  # absent on ROCm
    return Device(properties.name.replace(" ", "_"), shared_memory, torch.cuda.get_device_capability(device) >= (9, 0))


@lru_cache(maxsize=4096)
def experts(problem: Problem, device: Device) -> Experts:
    """The configuration of `fused_experts_lora` for these sizes: tuned, else by rule."""
    return _tuned("experts", Experts, problem, device) or experts_rule(problem, device)


@lru_cache(maxsize=4096)
def delta(problem: Problem, device: Device) -> Delta:
    """The configuration of `fused_moe_lora` for these sizes: tuned, else by rule."""
    return _tuned("delta", Delta, problem, device) or next(c for c in _delta_rules(problem) if is_valid(c, problem, device))


def experts_rule(problem: Problem, device: Device) -> Experts:
    """The configuration of `fused_experts_lora` by rule, whatever tables there are."""
    return next(c for c in _experts_rules(problem) if is_valid(c, problem, device))


def first_sizes(choose: Callable[[int], Any], most: int) -> list[int]:
    """The smallest batch with each of the configurations that `choose` gives batches of 1 to `most` tokens.

    >>> first_sizes(lambda num_tokens: num_tokens > 4, 100)
    [1, 5]
    """
    first: dict[Any, int] = {}
    for num_tokens in range(1, most + 1):
        first.setdefault(choose(num_tokens), num_tokens)
    return list(first.values())


MAX_BLOCK_R = 32
MAX_SHRINK_PROGRAMS = 1056  # 8 a multiprocessor of an H200; they stride over what there is
MAX_EXPAND_PROGRAMS = 2112  # of the delta op: smaller ones, 16 a multiprocessor
MAX_EXPAND_R = 64  # ranks of one step of the delta op's expand
MIN_WGMMA_M = 64
MAX_DIRECT_R = 64
MAX_SUMS = 64  # of the second shrink, fused


def block_r(max_rank: int) -> int:
    """Ranks of a shrink program and of one step of the expand.

    A tile is computed whole, so it must not be much wider than the smallest adapters of the pool; 16 is the least of tl.dot.
    """
    return 16 if max_rank <= 16 else MAX_BLOCK_R


def direct_block_r(max_rank: int) -> int:
    """Ranks of a step of a direct kernel: one adapter is all it has."""
    return 16 if max_rank <= 16 else 32 if max_rank <= 32 else MAX_DIRECT_R


def is_valid(config: Experts | Delta, problem: Problem, device: Device) -> bool:
    """Whether every kernel of the configuration compiles and fits, for a pool of any rank: the only place that says so."""
    tails: list[int] = []
    if isinstance(config, Delta):
        block_m = config.expand_m
        shrinks = [(config.shrink, config.shrink_m, problem.num_slices)]
        tiles = [config.shrink_m, config.expand_m, config.expand_n]
        if config.expand_tiles < 1 or config.expand_stages < 1:
            return False
        # Stages of a tile of B and one of the output; z, or the results on their way to a coalesced store, in fp32.
        stage = (MAX_EXPAND_R + config.expand_m) * config.expand_n * problem.dtype.itemsize
        more = max(config.expand_m * MAX_EXPAND_R * problem.dtype.itemsize, config.expand_m * config.expand_n * 4)
        shared = [config.expand_stages * stage + more]
        accumulators = [(config.expand_warps, config.expand_m * config.expand_n)]
    else:
        block_m = config.gate_up.block_m
        gemms = [(config.gate_up, problem.num_slices), (config.down, 1)]
        if config.down.block_m != block_m or min(s for g, _ in gemms for s in (g.num_stages, g.expand_stages)) < 1:
            return False  # both walk the same expert blocks
        shrinks = [(config.shrink13, config.segment_m, problem.num_slices), (config.shrink2, config.segment_m, 1)]
        tiles = [config.segment_m, config.combine_n, *(t for g, _ in gemms for t in (g.block_m, g.block_n, g.block_k))]
        tails = [g.tail_m for g, _ in gemms if g.tail_m]
        tiles += tails
        shared = [_gemm_shared(gemm, slices, problem) for gemm, slices in gemms]
        if config.direct:
            sums = -(-problem.out_features // config.gate_up.block_n) if config.fuse_shrink2 else config.shrink2.splits
            for (gemm, slices), splits in zip(gemms, (config.shrink13.splits, sums)):
                shared.append(_direct_shared(gemm, slices, splits, problem))
        accumulators = [(g.num_warps, slices * g.block_m * g.block_n) for g, slices in gemms]
    tiles += [s.block_k for s, _, _ in shrinks]
    ranks = MAX_DIRECT_R if isinstance(config, Experts) and config.direct else MAX_BLOCK_R
    shared += [_shrink_shared(s, rows, ranks, slices, problem) for s, rows, slices in shrinks]
    warps = [w for w, _ in accumulators] + [s.num_warps for s, _, _ in shrinks]
    return (
        all(t >= 16 and t & (t - 1) == 0 for t in tiles)  # the smallest tile of tl.dot, and powers of two only
        and all(w in (1, 2, 4, 8) for w in warps)
        and all(s.splits >= 1 and s.num_stages >= 1 for s, _, _ in shrinks)
        # From 64 rows on the expand is a WGMMA, fed from shared memory when z is loaded whole, but from registers when it is a
        # sum of splits; ptxas before 13.3 may overwrite such registers before they are read.
        and (block_m < MIN_WGMMA_M or all(s.splits == 1 for s, _, _ in shrinks))
        # Tiles are done again with block_m: a tail by the older tensor cores would have other bits than its repetition.
        and (block_m < MIN_WGMMA_M or min(tails, default=block_m) >= MIN_WGMMA_M)
        # 128 of a thread's 255 registers accumulate; operands of the older tensor cores are in registers too.
        and all(elements <= (128 if device.wide else 64) * 32 * w for w, elements in accumulators)
        and max(shared) <= device.shared_memory
    )


def _gemm_shared(gemm: Gemm, num_weights: int, problem: Problem) -> int:
    """Bytes of shared memory of a base GEMM: its pipeline, or what the expand and the store need after it."""
    stage = (gemm.block_m + num_weights * gemm.block_n) * gemm.block_k * problem.dtype.itemsize
    # A step of the expand: 64 columns of z and of B for each weight. The results on their way to a coalesced store.
    step = num_weights * (gemm.block_m + gemm.block_n) * 64 * problem.dtype.itemsize
    store = gemm.block_m * gemm.block_n * problem.dtype.itemsize
    return max(gemm.num_stages * stage, gemm.expand_stages * step, store)


def _direct_shared(gemm: Gemm, num_weights: int, splits: int, problem: Problem) -> int:
    """Bytes of a step of a direct expand: all splits of a row of z, B as it comes and as an operand, z as an operand."""
    sums = (1 << (splits - 1).bit_length()) * 4
    return num_weights * (sums + (2 * gemm.block_n + 16) * problem.dtype.itemsize) * MAX_DIRECT_R


def _shrink_shared(shrink: Shrink, block_m: int, ranks: int, num_slices: int, problem: Problem) -> int:
    stage = (block_m + num_slices * ranks) * shrink.block_k * problem.dtype.itemsize
    return max(shrink.num_stages * stage, block_m * ranks * 4)


def _experts_rules(problem: Problem) -> Iterator[Experts]:
    """Best first; the last one fits every device."""
    if problem.num_pairs <= 32 and 4 * problem.num_pairs <= problem.num_experts:  # hardly two pairs share an expert
        small = problem.dtype == torch.float32
        # One token of 8 choices is less than a program a multiprocessor: longer steps keep as many bytes in flight.
        for block_k, stages in (((256, 3),) if problem.num_pairs <= 8 and not small else ()) + ((128, 3), (128, 2)):
            gemm = Gemm(16, 32, 32, 4, stages, expand_stages=1) if small else Gemm(16, 64, block_k, 4, stages, 1, True, 1)
            # H200, T = 1: 28.2 -> 27.1 us. A program of down has all sums of its pair in registers.
            few_sums = problem.out_features <= MAX_SUMS * gemm.block_n
            config = _experts(problem, gemm, gemm, shrink_k=32 if small else 128, shrink_stages=4 if stages > 2 else 2)
            yield dataclasses.replace(config, direct=True, fuse_shrink2=few_sums)
    if problem.dtype == torch.float32:  # full precision has no tensor cores: small tiles, made to be exact, not fast
        block_m = 16 if problem.num_pairs <= 16 * problem.num_experts else 32
        gemm = Gemm(block_m, 32, 32, 4, 2, expand_stages=1)
        yield _experts(problem, gemm, gemm, shrink_k=32)
        return
    # Rows an expert gets on average decide: below 8 the bytes of the weights are everything and rows are padding; a tile of
    # twice the average keeps most experts in one block, so that their weights are read once.
    rows = problem.num_pairs / problem.num_experts
    if rows > 64:
        for stages in (4, 3, 2):
            # One stage of the expand: with two, gate_up took 8.4 ms, not 0.75, at T = 8192 (H200, Triton 3.6; not understood).
            gate_up = Gemm(128, 128, 64, 8, stages, 8, True, expand_stages=1, tail_m=64)
            down = Gemm(128, 256, 64, 8, stages, 8, True, expand_stages=1, tail_m=64)
            if rows <= 256:
                yield _experts(problem, gate_up, down, segment_m=32, shrink_stages=3)
            else:  # no overlap to gain: 1 % without dependent launch and with a stage less (H200, T = 8192)
                # One product for gate and up: base -3.5 and -4.1 %, with adapters -0.4 and -2.2 % (T = 8192, 16384).
                gate_up = dataclasses.replace(gate_up, merged=True)
                config = _experts(problem, gate_up, down, segment_m=64, shrink_k=64, shrink_stages=3)
                yield dataclasses.replace(config, pdl=False)
    if rows > 16:
        for stages in (3, 2):
            gate_up, down = (Gemm(64, n, 64, 4, stages, 1, True, expand_stages=1) for n in (64, 128))
            yield _experts(problem, gate_up, down)
    for block_m, at_least in ((32, 8), (16, 0)):  # decode: wide K tiles keep enough bytes in flight
        if rows > at_least:
            for stages in (3, 2):
                gemm = Gemm(block_m, 64, 128, 4, stages, 1, True)
                yield _experts(problem, gemm, gemm)
    gemm = Gemm(16, 32, 64, 4, 2, expand_stages=1)
    yield _experts(problem, gemm, gemm, shrink_k=64)


def _experts(
    problem: Problem, gate_up: Gemm, down: Gemm, *, segment_m: int = 16, shrink_k: int = 128, shrink_stages: int = 4
) -> Experts:
    # gate_up starts before its shrink ends and hides it; summing splits costs it registers (H200, T = 8: 25 us with 4).
    few = problem.num_pairs <= 32
    splits = [_splits(problem, k, shrink_k) if few else 1 for k in (problem.in_features, problem.out_features)]
    warps = 2 if segment_m == 16 else 4  # H200, T = 32: 13.0 us with 2 warps, 14.1 with 4
    shrink13, shrink2 = (Shrink(shrink_k, s, warps, min(shrink_stages, gate_up.num_stages + 1)) for s in splits)
    # One token has few programs to share its sum; many tokens have enough.
    return Experts(gate_up, down, shrink13, shrink2, segment_m, combine_n=256 if problem.num_pairs <= 256 else 1024)


def _splits(problem: Problem, in_features: int, block_k: int) -> int:
    """Splits of K: a segment block is one program, and a few of them in serial loops over K leave most of the device idle."""
    steps = in_features // block_k
    if problem.num_pairs > 8:
        return max(1, min(4, steps // 3))  # H200, T = 2 and 4: more cost the GEMMs that add them up
    return max(1, min(8, steps))


def _delta_rules(problem: Problem) -> Iterator[Delta]:
    """Best first; the last one fits every device. Both kernels live on bytes: many small programs keep them in flight."""
    if problem.dtype == torch.float32:
        yield Delta(Shrink(32, _splits(problem, problem.in_features, 32), 4, 2), 16, 16, 32, 4, 4, 2)
        return
    pairs, k = problem.num_pairs, problem.in_features
    splits = next((s for most, s in ((16, 8), (64, 4)) if pairs <= most), 1)
    # Columns of a tile, tiles that one program walks, warps, stages. H200: docs/measurements/gpu.md.
    walks = ((16, (64, 1, 2, 1)), (512, (32, 8, 1, 4)), (8192, (64, 16, 2, 4)))
    expand = next((walk for most, walk in walks if pairs <= most), (128, 8, 4, 3))
    if pairs > 32768 and k > 1024:  # tens of rows of one (expert, adapter): each tile of a wide A serves many
        yield Delta(Shrink(64, 1, 4, 4), 64, 16, *expand)
    for shrink_k, stages in ((128, 4), (128, 3), (64, 2)):
        columns, tiles, warps, expand_stages = expand
        shrink = Shrink(shrink_k, max(1, min(splits, k // shrink_k)), 2, stages)
        yield Delta(shrink, 16, 16, columns, tiles, warps, min(stages, expand_stages))
    yield Delta(Shrink(64, 1, 2, 2), 16, 16, 64, 1, 2, 1)


def table_path(op: str, problem: Problem, device: Device, folder: Path | None = None) -> Path:
    """Where the tuned table of an op ("experts" or "delta") lies for these sizes, in the package or in another folder."""
    sizes = f"E={problem.num_experts},H={problem.in_features},I={problem.out_features},S={problem.num_slices}"
    dtype = str(problem.dtype).removeprefix("torch.")
    return (folder or CONFIGS) / op / f"{sizes},dtype={dtype},device={device.name}.json"


def _tuned(op: str, kind: type[C], problem: Problem, device: Device) -> C | None:
    path = table_path(op, problem, device)
    config = nearest(read_table(path, kind), problem.num_pairs)  # type: ignore[arg-type]  # mypy takes kind for unhashable
    if config is None or is_valid(config, problem, device):
        return config
    _warn(path, f"{config} does not run on {device}")
    return None


@lru_cache(maxsize=None)
def read_table(path: Path, kind: type[C]) -> dict[int, C | None]:
    """A tuned table, or {} where there is none or, with a warning, where it is not one."""
    if not path.is_file():
        return {}
    try:
        return {max(int(key), 1): None if e is None else read(kind, e) for key, e in json.loads(path.read_text()).items()}
    except (AttributeError, TypeError, ValueError) as error:
        _warn(path, str(error))
        return {}


@lru_cache(maxsize=None)
def _warned(path: Path) -> list[str]:
    """What has been said of a table: a serving process is told once."""
    return []


def _warn(path: Path, why: str) -> None:
    if not _warned(path):
        warnings.warn(f"the rules serve instead of the tuned table {path}, which is not valid: {why}", stacklevel=2)
    _warned(path).append(why)


def nearest(table: dict[int, C | None], num_pairs: int) -> C | None:
    """The entry whose key is nearest to num_pairs in the logarithm, the smaller of two as near; None: the rule."""
    keys = sorted(table)
    between = (low for low, high in zip(keys, keys[1:]) if num_pairs**2 <= low * high)  # in integers: no rounding decides
    return table[next(between, keys[-1])] if keys else None


def read(kind: type[C], data: Any) -> C:
    """A configuration from its fields as JSON has them (dataclasses.asdict).

    Raises: TypeError, ValueError for a field that is missing, unknown or of another type.
    """
    hints = get_type_hints(kind)
    if not isinstance(data, dict) or data.keys() - hints.keys():
        raise ValueError(f"{kind.__name__} must have fields of {sorted(hints)}, got {data!r}")
    fields = {}
    for name, value in data.items():
        if dataclasses.is_dataclass(hints[name]):
            value = read(hints[name], value)
        elif type(value) is not hints[name]:
            raise TypeError(f"{name} of {kind.__name__} must be {hints[name].__name__}, got {value!r}")
        fields[name] = value
    return kind(**fields)
