"""From tensors whose names are understood to projections: what all formats with separate projections share.

A reader turns each name into a `Piece`; here the pieces of a projection are put together, checked against the base and read,
each tensor straight to where it stays.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import AdapterError
from .adapter import ProjectionLora
from .config import AdapterConfig
from .files import TensorFiles, check_finite, is_finite
from .geometry import MoeGeometry
from .names import check_shape

PLAIN, TRANSPOSED, FLAT = "plain", "transposed", "flat"
PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "gate_up_proj": "gate_up"}
PROJECTIONS |= {"w1": "gate", "w3": "up", "w2": "down"}  # Mixtral's names

Layers = dict[int, dict[str, ProjectionLora]]


@dataclass(frozen=True)
class Reading:
    """What a reader found, and how it knows."""

    layers: Layers
    format: str
    proof: str


class Piece(NamedTuple):
    """One tensor of a LoRA pair, and what its name says."""

    name: str
    path: str  # of the module in the base model, for rank_pattern and alpha_pattern
    layer: int
    projection: str  # gate, up, down, or gate_up for both halves of the first projection
    half: str  # A or B
    expert: int | None  # None: all experts, in dimension 0, or one tensor that they share
    layout: str = PLAIN  # A (r, in), B (out, r); TRANSPOSED (in, r), (r, out); FLAT: dimensions 0 and 1 of A in one


_Side = dict[int | None, Piece]  # by expert


def assemble(pieces: Iterable[Piece], tensors: TensorFiles, config: AdapterConfig, geometry: MoeGeometry) -> Layers:
    """Check and read all pieces of an adapter.

    Raises: AdapterError naming the tensor, what was expected and what came.
    """
    found: dict[int, dict[str, dict[str, _Side]]] = {}
    for piece in pieces:
        _check_place(piece, geometry)
        side = found.setdefault(piece.layer, {}).setdefault(piece.projection, {"A": {}, "B": {}})[piece.half]
        other = side.setdefault(piece.expert, piece)
        if other is not piece:
            raise AdapterError(f"{piece.name}: one lora_{piece.half} per expert and projection expected, got also {other.name}")
    layers: Layers = {}
    for layer, projections in sorted(found.items()):
        if "gate_up" in projections and len(projections.keys() & {"gate", "up"}):
            names = [_any(projections[p]).name for p in ("gate_up", "gate", "up") if p in projections]
            raise AdapterError(f"gate and up must be in one form in a layer, got {' and '.join(names)}")
        parts = [_Projection(p, sides["A"], sides["B"], tensors, config, geometry) for p, sides in projections.items()]
        tensors.read_stacks(stack for part in parts for stack in part.stacks())
        layers[layer] = {}
        for part in parts:
            layers[layer] |= part.read()
    return layers


def _check_place(piece: Piece, geometry: MoeGeometry) -> None:
    if not geometry.gated and "gate" in piece.projection:
        raise AdapterError(f"{piece.name}: projection must be up or down (the base's have no gate), got {piece.projection}")
    if piece.expert is not None and piece.expert >= geometry.num_experts:
        raise AdapterError(f"{piece.name}: expert must be < num_experts = {geometry.num_experts}, got {piece.expert}")


def _any(sides: Mapping[str, _Side]) -> Piece:
    return next(piece for side in sides.values() for piece in side.values())


class _Projection:
    """The pieces of one projection of one layer."""

    def __init__(
        self, projection: str, a: _Side, b: _Side, tensors: TensorFiles, config: AdapterConfig, geometry: MoeGeometry
    ) -> None:
        self.projection, self.a, self.b = projection, a, b
        self.tensors, self.config, self.geometry = tensors, config, geometry
        self.size_in, self.size_out = geometry.sizes("down" if projection == "down" else "up")
        self.size_out *= 2 if projection == "gate_up" else 1
        self.experts = self._experts()
        self.paths = {e: (a.get(e) or b[e]).path for e in self.experts or (None,)}
        self.ranks = {e: config.rank(path) for e, path in self.paths.items()}
        self._check_shared()
        self._check_shapes()
        self._stacks = {half: self._stack(side) for half, side in (("A", a), ("B", b)) if None not in side}

    def _experts(self) -> list[int]:
        """The experts that have pieces of their own; none where both sides hold all experts in one tensor."""
        for side in (self.a, self.b):
            if None in side and len(side) > 1:
                names = [piece.name for piece in list(side.values())[:2]]
                raise AdapterError(f"experts must be in one tensor or in one each, got {' and '.join(names)}")
        of_a, of_b = ({e for e in side if e is not None} for side in (self.a, self.b))
        lonely = [(self.a.get(e) or self.b[e]) for e in sorted(of_a ^ of_b)]
        if lonely and of_a and of_b or not self.a or not self.b:
            piece = lonely[0] if lonely else next(iter((self.a or self.b).values()))
            raise AdapterError(f"{piece.path} must have lora_A and lora_B, got only {piece.name}")
        for expert in self.a.keys() & self.b.keys():
            mine, other = self.a[expert], self.b[expert]
            if mine.path != other.path:
                raise AdapterError(f"{mine.path} must have lora_A and lora_B, got {mine.name} and {other.name}")
        if len(lonely) not in (0, self.geometry.num_experts):  # the other side is shared
            missing = min(set(range(self.geometry.num_experts)) - of_a - of_b)
            raise AdapterError(
                f"{lonely[0].path} must have siblings for all {self.geometry.num_experts} experts, beside one tensor that they "
                f"share, got none for expert {missing}"
            )
        return sorted(of_a | of_b)

    def _check_shared(self) -> None:
        """Where one side is shared, rank and scaling are the same for all experts."""
        shared = [side[None] for side in (self.a, self.b) if None in side]
        for piece in shared:
            for path in self.paths.values():
                mine, other = (self.config.rank(p) for p in (piece.path, path))
                if mine != other or self.config.scaling(piece.path) != self.config.scaling(path):
                    raise AdapterError(
                        f"{piece.name} must have one rank and one scaling with {path} (rank_pattern, alpha_pattern), got ranks "
                        f"{mine} and {other}, scalings {self.config.scaling(piece.path)} and {self.config.scaling(path)}"
                    )

    def stacks(self) -> Iterable[tuple[list[str], Tensor]]:
        """What `read` wants to have been read in one go: the names of the experts' tensors, and where they belong."""
        for half, (stack, at_once) in self._stacks.items():
            if at_once:
                yield self._names(half), stack

    def read(self) -> dict[str, ProjectionLora]:
        """The projection, or gate and up of a gate_up."""
        a, b = self._tensor("A"), self._tensor("B")
        scalings = {expert: self.config.scaling(path) for expert, path in self.paths.items()}
        everywhere = [scalings.get(expert, 0.0) for expert in range(self.geometry.num_experts) if self.experts]
        one = set(everywhere or scalings.values())
        scaling = torch.tensor(list(one) if len(one) == 1 else everywhere, dtype=torch.float32)
        if self.projection != "gate_up":
            return {self.projection: ProjectionLora(a, b, scaling)}
        inner, rank = self.geometry.intermediate_size, b.shape[2]
        gate, up = (b[:, 0::2], b[:, 1::2]) if self.geometry.interleaved else (b[:, :inner], b[:, inner:])
        a_gate, a_up = (a[:, :rank], a[:, rank:]) if a.shape[1] > rank else (a, a)
        return {"gate": ProjectionLora(a_gate, gate, scaling), "up": ProjectionLora(a_up, up, scaling)}

    def _check_shapes(self) -> None:
        any_rank = next(iter(self.ranks.values()))
        for half, side in (("A", self.a), ("B", self.b)):
            checked: set[tuple[int, tuple[int, ...]]] = set()  # of single experts
            for expert, piece in side.items():
                rank = self.ranks.get(expert, any_rank)
                shape = self.tensors.shape(piece.name)
                if expert is not None and (rank, shape) in checked:
                    continue
                checked.add((rank, shape))
                outer = ("in", self.size_in) if half == "A" else ("out", self.size_out)
                rows = ("r of the config", rank)
                apart = self.projection == "gate_up" and piece.layout == PLAIN and expert is None
                if half == "A" and apart and shape[1:2] == (2 * rank,):
                    rows = ("r of the config for gate and for up", 2 * rank)  # an A for each, one above the other
                sizes = [rows, outer] if half == "A" else [outer, rows]
                if piece.layout == TRANSPOSED:
                    sizes.reverse()
                if expert is None and piece.layout == FLAT:
                    sizes[0] = (f"experts times {rows[0]}", self.geometry.num_experts * rows[1])
                elif expert is None:
                    sizes.insert(0, ("1, shared by all experts" if shape[:1] == (1,) else "experts", self._lead(shape)))
                check_shape(piece.name, shape, *sizes)

    def _lead(self, shape: tuple[int, ...]) -> int:
        return 1 if shape[:1] == (1,) else self.geometry.num_experts

    def _names(self, half: str) -> list[str]:
        side = self.a if half == "A" else self.b
        return [side[expert].name for expert in self.experts]

    def _stack(self, side: _Side) -> tuple[Tensor, bool]:
        """Memory for A (E, r, in) or B (E, out, r) of separate experts, and whether their tensors fill it as they are."""
        is_a = next(iter(side.values())).half == "A"
        largest, dtypes = max(self.ranks.values()), {self.tensors.dtype(piece.name) for piece in side.values()}
        dtype = functools.reduce(torch.promote_types, dtypes)
        shape = (largest, self.size_in) if is_a else (self.size_out, largest)
        full = len(side) == self.geometry.num_experts and min(self.ranks.values()) == largest
        stack = (torch.empty if full else torch.zeros)(self.geometry.num_experts, *shape, dtype=dtype)
        return stack, full and len(dtypes) == 1

    def _tensor(self, half: str) -> Tensor:
        """A (E or 1, r, in) or B (E or 1, out, r); experts without a piece are zeros, smaller ranks padded with zeros."""
        side = self.a if half == "A" else self.b
        if None in side:
            piece = side[None]
            tensor = self.tensors.read(piece.name)
            if piece.layout == FLAT:
                return tensor.view(self.geometry.num_experts, -1, self.size_in)
            return tensor.transpose(1, 2) if piece.layout == TRANSPOSED else tensor
        stack, at_once = self._stacks[half]
        parts = zip(self._names(half), (self._part(stack, expert, half == "A") for expert in self.experts))
        if not at_once:
            for name, part in parts:
                self.tensors.read_into(name, part)
                check_finite(name, part)
        elif not is_finite(stack):  # in one go where it can be: a file may have 100,000 tensors
            for name, part in parts:
                check_finite(name, part)
        # Some exporters copy what all experts share: one row then, as in the files that do not.
        same = at_once and torch.equal(stack[0], stack[-1]) and bool((stack == stack[:1]).all())
        return stack[:1].clone() if same else stack

    def _part(self, stack: Tensor, expert: int, is_a: bool) -> Tensor:
        rank = self.ranks[expert]
        return stack[expert, :rank] if is_a else stack[expert, :, :rank]
