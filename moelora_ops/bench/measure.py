"""One cell: its values, its times, its floors."""

from __future__ import annotations

import dataclasses
import statistics
import traceback
from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import torch

from .. import ops
from ..testing import timing
from ..testing.cases import Inputs
from . import calls, peers, values
from .cells import Cell
from .floors import Ceilings, floor_us, memory_bound
from .inputs import Weights, compacted, idle, is_cold, make_batches, pair_experts, unloaded

OPS = ("layer", "delta", "align")


@dataclass
class Result:
    """What was measured in a cell. Times are microseconds of one call; what could not be measured is absent or None."""

    cell: Cell
    device: str = "cuda"  # its type
    sets: int = 0  # distinct (input, routing) sets timed
    cold: bool | None = None  # whether no set finds its weights in the L2; None where that is not known
    floor_base: float = 0.0
    floor_lora: float = 0.0
    us: dict[str, float] = field(default_factory=dict)  # medians, by name of the call
    spread: dict[str, float] = field(default_factory=dict)  # (largest - smallest sample) / median
    launches: dict[str, int | None] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)  # CPU time of an eager call
    extra_bytes: dict[str, int] = field(default_factory=dict)
    extra_bound: int = 0
    errors: dict[str, str] = field(default_factory=dict)  # by the part that failed: its message

    def ratio(self, name: str, to: str | float) -> float | None:
        """The time of a call over that of another, or over a number of microseconds."""
        divisor = self.us.get(to) if isinstance(to, str) else to
        return self.us[name] / divisor if name in self.us and divisor else None


class Bench:
    """Measures cells on a device, each against the same ceilings."""

    def __init__(self, device: torch.device, ops: Sequence[str] = OPS) -> None:
        self.device, self.ops = device, ops
        self.cache = timing.cache_bytes(device)
        self.ceilings = Ceilings(timing.copy_bandwidth(device), timing.matmul_rate(device))
        self.peers = peers.available(device) if "layer" in ops else []
        self._weights = Weights(device)

    def run(self, cell: Cell) -> Result:
        """Measure a cell. What fails, in whatever way, is an entry of `errors`: the other parts and cells go on."""
        result = Result(cell, self.device.type)
        with torch.inference_mode():
            batches = self._part(result, "inputs", lambda: self._prepare(result))
            if batches is None:
                return result
            for op in self.ops:
                self._part(result, op, lambda: _PARTS[op](self, result, batches))
        return result

    def _part(self, result: Result, name: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:  # a kernel that cannot be compiled or launched fails in ways that have no common type
            where = traceback.extract_tb(error.__traceback__)[-1]
            result.errors[name] = f"{type(error).__name__}: {error} ({where.name})"
            return None

    def _prepare(self, result: Result) -> list[Inputs]:
        batches = make_batches(self._weights.of(result.cell), result.cell, self.cache)
        floors = [floor_us(batch, self.ceilings) for batch in batches]
        result.sets, result.cold = len(batches), is_cold(batches, self.cache)
        result.floor_base, result.floor_lora = (statistics.mean(column) for column in zip(*floors))
        result.extra_bound = memory_bound(batches[0])
        return batches

    def _layer(self, result: Result, batches: list[Inputs]) -> None:
        values.check_layer(batches[0])
        pairs = int((pair_experts(batches[0]) >= 0).sum())
        timed: dict[str, tuple[Callable[[Any], Any], Sequence[Any]]] = {
            "base": (calls.base, batches),
            "lora": (calls.lora, batches),
            "idle": (calls.lora, [idle(batch) for batch in batches]),
            "unloaded": (calls.lora, [unloaded(batch) for batch in batches]),
            "batched": (lambda call: call(), [calls.Batched(batch, pairs) for batch in batches]),
        }
        case = batches[0].case
        if case.ranks and max(case.ranks) < case.max_lora_rank:  # what the pool's unused ranks cost
            rank = max(case.ranks)
            pool = compacted(batches[0], rank)
            small = case.like(max_lora_rank=rank)
            timed["compact"] = (calls.lora, [batch.replace(case=small, **pool) for batch in batches])
        self._time(result, timed)
        if self.device.type == "cuda":
            for name, call in (("base", calls.base), ("lora", calls.lora)):
                result.launches[name] = timing.num_launches(lambda: call(batches[0]))
                result.extra_bytes[name] = timing.extra_bytes(lambda: call(batches[0]))
                args, options = batches[0].experts(adapters=name == "lora")
                result.host_us[name] = timing.host_us(lambda: ops.fused_experts_lora(*args, **options))
        for peer in self.peers:
            self._part(result, peer.name, lambda: self._time(result, peer.calls(batches)))

    def _align(self, result: Result, batches: list[Inputs]) -> None:
        values.check_align(batches[0])
        self._time(result, {"align": (calls.align, batches)})
        routing = calls.routing_of(batches[0])
        if routing is not None:
            self._time(result, {"route": (routing, batches)})

    def _delta(self, result: Result, batches: list[Inputs]) -> None:
        if batches[0].case.interleaved:
            return  # a slice of the delta op is a block of columns
        deltas = [calls.Delta(batch) for batch in batches]
        values.check_delta(deltas[0])
        self._time(result, {"delta": (lambda delta: delta(), deltas)})

    def _time(self, result: Result, timed: timing.Calls) -> None:
        for name, samples in timing.samples_us(timed, self.device).items():
            result.us[name] = statistics.median(samples)
            result.spread[name] = (max(samples) - min(samples)) / result.us[name]


_PARTS: dict[str, Callable[[Bench, Result, list[Inputs]], None]] = {
    "layer": Bench._layer,
    "align": Bench._align,
    "delta": Bench._delta,
}


def to_json(result: Result) -> dict[str, Any]:
    """A result as plain data."""
    return dataclasses.asdict(result)


def from_json(data: dict[str, Any]) -> Result:
    """The result that `to_json` was given; unknown keys are ignored."""
    names = {f.name for f in dataclasses.fields(Result)}
    known = {name: value for name, value in data.items() if name in names}
    return Result(**{**known, "cell": Cell(**data["cell"])})
