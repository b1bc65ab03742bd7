"""From times to a configuration: the best of each stage, combined, and kept only where the whole layer gains by it.

A table's entry serves every size nearer to its key than to another's, so what is fast at the key alone is worth nothing: every
candidate that comes near to winning is also timed at both ends of that range, and a configuration that loses to the rule at
either is not taken, however fast it is at the key. (H200, Triton 3.6: with a tail of 64 rows and two stages of the expand,
gate_up took 8.4 ms instead of 0.75 at T = 8192 and was the fastest at T = 2048.)
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterator, Mapping, Protocol, Sequence

from ..kernels.config import Device, Experts, Problem, is_valid
from .candidates import families

NOISE = 0.02  # less is neither a gain nor a loss
FINALISTS = 2  # of each stage and size of block,
NEAR = 1.2  # GEMMs at most so much slower than the rule's: a shrink that wants other splits may pay for it
STAGES = ("shrink13", "gate_up", "shrink2", "down", "combine")

Part = tuple[Any, ...]  # what the time of a stage depends on


class Timer(Protocol):
    """Microseconds of configurations of one shape; infinite for what does not run."""

    def stages(self, tiles: Experts, num_tokens: int, names: Sequence[str]) -> dict[str, float]:
        """Of each named stage alone: with adapters plus without."""
        ...

    def layers(self, configs: Sequence[Experts], num_tokens: int) -> list[Layer]:
        """Of the whole layer, the configurations taking turns."""
        ...

    def is_right(self, tiles: Experts, num_tokens: int) -> bool:
        """Whether the values of a configuration are those of the reference."""
        ...


@dataclass(frozen=True)
class Layer:
    """Microseconds of the layer without and with adapters."""

    base: float
    lora: float

    @property
    def total(self) -> float:
        return self.base + self.lora


@dataclass(frozen=True)
class Found:
    """What a search found for a batch size; `tuned` is None where the rule stands."""

    num_tokens: int
    rule: Layer
    best: Layer  # of `tuned`, or of the rule
    tuned: Experts | None
    refused: int  # configurations that were faster there, but lost at an end of the range
    wrong: int  # configurations that were faster, with values that are not the reference's

    @property
    def gain(self) -> float:
        return self.rule.total / self.best.total - 1


def ranges(tokens: Sequence[int]) -> dict[int, tuple[int, int]]:
    """The smallest and the largest batch that each size serves as a key; the outer ones serve down to half and up to twice.

    >>> ranges([1, 8, 32])
    {1: (1, 2), 8: (3, 16), 32: (17, 64)}
    """
    sizes = sorted(set(tokens))
    low = sizes[0] // 2 + 1
    found = {}
    for size, following in itertools.zip_longest(sizes, sizes[1:]):
        high = 2 * size if following is None else max(size, math.isqrt(size * following))
        found[size] = (low, high)
        low = high + 1
    return found


def search(
    num_tokens: int, span: tuple[int, int], rule: Callable[[int], Experts], problem: Problem, device: Device, timer: Timer
) -> Found:
    """The configuration for `num_tokens` that also serves the range `span`.

    Args:
        rule: the rule's configuration of a number of tokens. problem: of num_tokens.
    """
    sizes = list(dict.fromkeys((num_tokens, *span)))
    winners = []
    for trials in families(rule(num_tokens), problem, device):
        winner = _combined(trials, sizes, problem, device, timer)
        if winner is not None:
            winners += [winner, replace(winner, pdl=not winner.pdl)]
    contenders = [c for c in dict.fromkeys(winners) if c != rule(num_tokens)]
    measured = {size: timer.layers([rule(size), *contenders], size) for size in sizes}
    rules = {size: layers[0] for size, layers in measured.items()}
    refused = wrong = 0
    scores = {c: [measured[size][i].total / rules[size].total for size in sizes] for i, c in enumerate(contenders, 1)}
    for tiles in sorted(contenders, key=lambda c: sum(scores[c])):
        at_key, *at_ends = scores[tiles]
        if at_key * (1 + NOISE) >= 1:
            continue
        if max(at_ends, default=0.0) > 1 + NOISE:
            refused += 1
        elif not all(timer.is_right(tiles, size) for size in sizes):
            wrong += 1
        else:
            best = measured[num_tokens][contenders.index(tiles) + 1]
            return Found(num_tokens, rules[num_tokens], best, tiles, refused, wrong)
    return Found(num_tokens, rules[num_tokens], rules[num_tokens], None, refused, wrong)


def _combined(trials: list[Experts], sizes: list[int], problem: Problem, device: Device, timer: Timer) -> Experts | None:
    """The best stages of all trials in one configuration, by their times at every size; None where nothing ran."""
    key, *ends = sizes
    times = _times(trials, key, timer)
    finalists = _finalists(trials[0], times)
    scores: defaultdict[tuple[str, Part], float] = defaultdict(float)
    for size in sizes:
        at_size = times if size == key else _times(trials, size, timer, only=finalists)
        # The whole layer of the first trial is 1 at each size, so that no size and no stage weighs more than it takes.
        scale = sum(at_size[stage, part(trials[0], stage)] for stage in STAGES)
        for which in finalists:
            scores[which] += at_size[which] / scale if math.isfinite(scale) else math.inf
    best = min(_combinations(trials[0], scores), key=lambda found: found[0], default=(math.inf, None))
    return best[1] if math.isfinite(best[0]) and best[1] and is_valid(best[1], problem, device) else None


def part(tiles: Experts, stage: str) -> Part:
    """What of a configuration the time of a stage depends on."""
    if stage == "combine":
        return (tiles.combine_n,)
    if stage in ("shrink13", "shrink2"):
        return (getattr(tiles, stage), tiles.segment_m)
    shrink = tiles.shrink13 if stage == "gate_up" else tiles.shrink2
    return (getattr(tiles, stage), shrink.splits)  # the expand sums them


def _times(
    trials: list[Experts], num_tokens: int, timer: Timer, only: Sequence[tuple[str, Part]] | None = None
) -> dict[tuple[str, Part], float]:
    """Time of each stage in each of its forms, once."""
    times: dict[tuple[str, Part], float] = {}
    for tiles in trials:
        forms = {stage: (stage, part(tiles, stage)) for stage in STAGES}
        names = [stage for stage, form in forms.items() if form not in times and (only is None or form in only)]
        if names:
            times |= {forms[stage]: time for stage, time in timer.stages(tiles, num_tokens, names).items()}
    return times


def _finalists(first: Experts, times: Mapping[tuple[str, Part], float]) -> list[tuple[str, Part]]:
    """The stages of the first trial, which win where nothing is better, and the best among those that fit the same others."""
    groups: defaultdict[Any, list[tuple[str, Part]]] = defaultdict(list)
    for (stage, form), time in times.items():
        if stage not in ("gate_up", "down") or time <= NEAR * times[stage, part(first, stage)]:
            groups[stage, _fits(stage, form)].append((stage, form))
    best = [form for forms in groups.values() for form in sorted(forms, key=times.__getitem__)[:FINALISTS]]
    return list(dict.fromkeys([*((stage, part(first, stage)) for stage in STAGES), *best]))


def _fits(stage: str, form: Part) -> Any:
    """What other stages must have in common with this one: rows of a block, splits."""
    if stage == "combine":
        return None
    return (form[0].splits, form[1]) if stage.startswith("shrink") else (form[0].block_m, form[1])


def _combinations(first: Experts, scores: Mapping[tuple[str, Part], float]) -> Iterator[tuple[float, Experts]]:
    """Every configuration that the scored stages make, with the sum of their scores."""
    forms = {stage: [form for name, form in scores if name == stage] for stage in STAGES}
    combine = min(forms["combine"], key=lambda form: scores["combine", form])
    for gate_up, down in itertools.product(forms["gate_up"], forms["down"]):
        if gate_up[0].block_m != down[0].block_m:
            continue
        tiles = replace(first, gate_up=gate_up[0], down=down[0], combine_n=combine[0])
        score = scores["combine", combine] + scores["gate_up", gate_up] + scores["down", down]
        for shrink13, shrink2 in itertools.product(forms["shrink13"], forms["shrink2"]):
            if shrink13[1] == shrink2[1] and (shrink13[0].splits, shrink2[0].splits) == (gate_up[1], down[1]):
                shrinks = scores["shrink13", shrink13] + scores["shrink2", shrink2]
                shrunk = replace(tiles, shrink13=shrink13[0], shrink2=shrink2[0], segment_m=shrink13[1])
                yield score + shrinks, shrunk
