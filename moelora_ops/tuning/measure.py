"""Times configurations of one shape, as `bench` times the ops: CUDA graphs over distinct sets of cold weights."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any, Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..bench import values
from ..bench.cells import Cell
from ..bench.inputs import Weights, make_batches
from ..kernels.config import Experts
from ..testing import timing
from ..testing.cases import Inputs
from .compiling import Compiler, Job
from .search import Layer

CHECKED_TOKENS = 8192  # the largest batch whose values are checked: above, tiles do nothing else


class DeviceTimer:
    """The `search.Timer` of a device. What fails, in whatever way, is noted in `errors` and takes forever.

    Args: cell: shape and pool; the number of tokens is an argument of each method.
    """

    def __init__(self, cell: Cell, device: torch.device, weights: Weights, compiler: Compiler) -> None:
        self.cell, self.device, self.errors = cell, device, dict[str, int]()  # messages, and how often they came
        self._weights, self._compiler = weights, compiler
        self._batches, self._failed = dict[int, list[Inputs]](), set[tuple[Experts, bool]]()

    def compile(self, configs: Iterable[tuple[Experts, int]]) -> None:
        """Compile configurations for numbers of tokens, in parallel, with adapters and without."""
        cases = [(tiles, dataclasses.replace(self.cell, num_tokens=tokens).case()) for tiles, tokens in configs]
        jobs = {(t, a): Job(case, t, a, str(self.device)) for t, case in cases for a in (True, False)}
        for job, message in self._compiler(jobs.values()).items():
            self._failed.add((job.tiles, job.adapters))
            self._note(message)

    def batches(self, num_tokens: int) -> list[Inputs]:
        """The distinct sets of a batch size, with ranks and switches as a pool has them; the last few sizes are kept."""
        if num_tokens not in self._batches:
            if len(self._batches) >= 3:
                del self._batches[next(iter(self._batches))]
            cell = dataclasses.replace(self.cell, num_tokens=num_tokens)
            case = cell.case()
            ranks = torch.tensor(case.ranks or (case.max_lora_rank,) * case.max_loras, dtype=torch.int32, device=self.device)
            pool = {"lora_ranks": ranks, "adapter_enabled": torch.ones_like(ranks)}
            sets = make_batches(self._weights.of(cell), cell, timing.cache_bytes(self.device))
            self._batches[num_tokens] = [batch.replace(**pool) for batch in sets]
        return self._batches[num_tokens]

    def stages(self, tiles: Experts, num_tokens: int, names: Sequence[str]) -> dict[str, float]:
        """Microseconds of each named stage alone, with adapters plus, where it runs at all, without."""
        times = dict.fromkeys(names, 0.0)
        for adapters in (True, False):
            needed = [name for name in names if adapters or name in ("gate_up", "down")]
            if needed:
                for name, time in self._stages(tiles, num_tokens, needed, adapters).items():
                    times[name] += time
        return times

    def layers(self, configs: Sequence[Experts], num_tokens: int) -> list[Layer]:
        """Microseconds of the whole layer, all configurations taking turns."""
        self.compile([(tiles, num_tokens) for tiles in configs])
        timed: dict[str, Any] = {}
        for i, tiles in enumerate(configs):
            for adapters in (True, False):
                ready = self._attempt(lambda: self._ready(tiles, num_tokens, adapters), None)
                if ready is not None:
                    timed[f"{i} {adapters}"] = ready
        samples = timing.samples_us(timed, self.device)
        us = {name: statistics.median(times) for name, times in samples.items()}
        return [Layer(*(us.get(f"{i} {adapters}", math.inf) for adapters in (False, True))) for i in range(len(configs))]

    def is_right(self, tiles: Experts, num_tokens: int) -> bool:
        """Whether base, adapters, idle adapters and an empty pool compute what they have to."""
        try:
            batch = self.batches(min(num_tokens, CHECKED_TOKENS))[0]
            values.check_layer(batch, base=lambda b: run(tiles, b, False), lora=lambda b: run(tiles, b, True))
        except AssertionError as error:
            self._note(f"WRONG VALUES at T={num_tokens}: {error}, by {tiles}")
            return False
        return True

    def _ready(self, tiles: Experts, num_tokens: int, adapters: bool) -> tuple[Callable[[Any], Any], list[Any]]:
        """The layer as a function of a call, and the calls; they have run."""
        plan, calls = self._plan(tiles, num_tokens, adapters)
        plan.run(calls[0])
        self._synchronize()
        return plan.run, calls

    def _plan(self, tiles: Experts, num_tokens: int, adapters: bool) -> tuple[Any, list[Any]]:
        from ..kernels.triton.experts import make_plan

        if (tiles, adapters) in self._failed:
            raise RuntimeError("was not compiled")
        calls = [call_of(batch, adapters) for batch in self.batches(num_tokens)]
        return make_plan(calls[0], tiles), calls

    def _stages(self, tiles: Experts, num_tokens: int, names: Sequence[str], adapters: bool) -> dict[str, float]:
        plan, calls = self._attempt(lambda: self._plan(tiles, num_tokens, adapters), (None, []))
        if plan is None:
            return dict.fromkeys(names, math.inf)
        bound = [_filled(plan.bind(call)) for call in calls]
        self._synchronize()  # the first runs are on a stream of their own
        return {name: self._attempt(lambda: _stage_us(plan, name, bound), math.inf) for name in names}

    def _attempt(self, function: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return function()
        except Exception as error:  # a kernel that cannot be compiled or launched fails in ways that have no common type
            self._note(f"{type(error).__name__}: {error}")
            self._synchronize()
            return otherwise

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _note(self, message: str) -> None:
        self.errors[message] = self.errors.get(message, 0) + 1


def call_of(batch: Inputs, adapters: bool) -> Any:
    """The batch as the kernels take it."""
    from ..kernels.triton.call import prepare

    args, options = batch.experts(adapters=adapters)
    return prepare(*args, **options)


def run(tiles: Experts, batch: Inputs, adapters: bool) -> Tensor:
    """The layer by a configuration."""
    from ..kernels.triton.experts import make_plan

    call = call_of(batch, adapters)
    out: Tensor = make_plan(call, tiles).run(call)
    return out


def _filled(values: dict[str, Any]) -> dict[str, Any]:
    """Finite values where a stage before would have written some: of sorted rows, of sums, and nothing to be done again."""
    for name in ("act", "rows", "z13", "z2"):
        if name in values:
            values[name].normal_()
    if "again" in values:
        values["again"].zero_()
    return values


def _stage_us(plan: Any, name: str, bound: list[dict[str, Any]]) -> float:
    from ..kernels.triton._launch import current_stream

    launches = [launch for launch in (getattr(plan, name), getattr(plan, f"{name}_again", None)) if launch is not None]
    if not launches:  # fused into another
        return 0.0

    def go(values: dict[str, Any]) -> None:
        stream = current_stream(plan.device)
        for launch in launches:
            launch(stream, *(tensor and values[tensor] for tensor in launch.names))

    return statistics.median(timing.samples_us({name: (go, bound)}, plan.device, rest=0.0)[name])
