"""What a node of a graph computes, as a product of tensors summed over the axes that its result lacks.

People write the same contraction as an einsum, as `bmm` of flattened batches, as `matmul` with unsqueezed operands or as a
product and a sum. All of them are one `Value`:

    value[dims] = scale * sum over the other axes of factor_1 * factor_2 * ...

An `Axis` is an index that factors share. A dimension of a tensor is a tuple of axes, outer first: () for a size of 1, two
after a view has merged two. Views only regroup axes, so they need no rules of their own beyond that, and an axis of unknown
(symbolic) size is as good as any. What is not understood is a factor as it stands, a `Leaf`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Iterator, NamedTuple, Sequence, Union

from torch.fx import Node

from ._inductor import plain, quotient, same


class NoMatch(Exception):
    """A node does not have the form that was looked for."""


class Abandoned(NoMatch):
    """Axes were identified before the form turned out to be another: nothing that was learnt may be used."""


@dataclass(eq=False)
class Axis:
    size: Any
    parts: tuple[Axis, ...] | None = None  # what it has turned out to be: an axis of another factor, or several

    def roots(self) -> tuple[Axis, ...]:
        return (self,) if self.parts is None else flat(self.parts)


Dims = tuple[tuple[Axis, ...], ...]


def flat(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    return tuple(root for axis in axes for root in axis.roots())


class Ref(NamedTuple):
    """Where an axis runs along a dimension (or a part) of a leaf: from `start`, of `extent` elements in all."""

    axis: Axis
    start: int
    extent: Any

    def roots(self) -> tuple[Ref, ...]:
        if self.axis.parts is None:
            return (self,)
        if len(self.axis.parts) == 1:
            return Ref(self.axis.parts[0], self.start, self.extent).roots()
        if not self.whole:
            raise Abandoned
        return tuple(root for part in self.axis.parts for root in Ref(part, 0, part.size).roots())

    @property
    def whole(self) -> bool:
        return self.start == 0 and same(self.extent, self.axis.size)


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor, or a part of it; `negated`: a mask, the other way round."""

    node: Node
    refs: tuple[tuple[Ref, ...], ...]
    negated: bool = False

    def dims(self) -> tuple[tuple[Ref, ...], ...]:
        return tuple(tuple(root for ref in dim for root in ref.roots()) for dim in self.refs)

    def all_refs(self) -> tuple[Ref, ...]:
        return tuple(ref for dim in self.dims() for ref in dim)

    def axes(self) -> tuple[Axis, ...]:
        return tuple(ref.axis for ref in self.all_refs())


@dataclass(frozen=True, eq=False)
class Gather(Leaf):
    """node[index_1, index_2, ...], `refs` being those of the dimensions that are left."""

    index: tuple[Leaf, ...] = ()

    def axes(self) -> tuple[Axis, ...]:
        return (*(axis for leaf in self.index for axis in leaf.axes()), *super().axes())


@dataclass(frozen=True, eq=False)
class Applied:
    """An elementwise function of a value."""

    name: str
    value: Value

    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for factor in self.value.factors for axis in factor.axes())


Factor = Union[Leaf, Applied]


@dataclass(frozen=True, eq=False)
class Value:
    factors: tuple[Factor, ...]
    dims: Dims
    scale: float = 1.0

    def axes(self) -> tuple[Axis, ...]:
        """Those of the result, in order."""
        return flat([axis for dim in self.dims for axis in dim])

    def bound(self) -> set[Axis]:
        """Those of the factors: an index outside them only repeats the value."""
        return {axis for factor in self.factors for axis in factor.axes() if not same(axis.size, 1)}

    def summed(self) -> set[Axis]:
        return self.bound() - set(self.axes())


def key(factor: Factor) -> Any:
    """Equal for factors that are the same numbers at the same places."""
    if isinstance(factor, Applied):
        return factor.name, factor.value.scale, sorted((key(f) for f in factor.value.factors), key=repr)
    refs = tuple(tuple((id(ref.axis), ref.start) for ref in dim) for dim in factor.dims())
    index = tuple(key(leaf) for leaf in factor.index) if isinstance(factor, Gather) else ()
    return id(factor.node), refs, factor.negated, index


def unify(left: Sequence[Axis], right: Sequence[Axis]) -> None:
    """Let two runs of axes be the same, splitting the larger where they are cut differently."""
    a, b = list(flat(left)), list(flat(right))
    while a and b:
        if same(a[0].size, b[0].size):
            first, second = a.pop(0), b.pop(0)
            if first is not second:
                first.parts = (second,)
        else:
            large, small = (a, b) if quotient(a[0].size, b[0].size) is not None else (b, a)
            rest = quotient(large[0].size, small[0].size)
            if rest is None:
                raise Abandoned
            axis = large.pop(0)
            axis.parts = (Axis(small[0].size), Axis(rest))
            large[:0] = axis.parts
    if a or b:
        raise Abandoned


def regroup(found: Value, shape: Sequence[Any]) -> Value:
    """The value seen with another shape."""
    axes, dims = list(found.axes()), []
    for size in (plain(s) for s in shape):
        dim: list[Axis] = []
        missing = size
        while not same(missing, 1):
            if not axes:
                raise NoMatch
            axis = axes.pop(0)
            rest = quotient(missing, axis.size)
            if rest is None:  # the axis is longer than the dimension
                more = quotient(axis.size, missing)
                if more is None:
                    raise NoMatch
                axis.parts = (Axis(missing), Axis(more))
                axis, behind = axis.parts
                axes.insert(0, behind)
                rest = 1
            dim.append(axis)
            missing = rest
        dims.append(tuple(dim))
    if axes:
        raise NoMatch
    return replace(found, dims=tuple(dims))


def part_of(found: Value, dim: int, start: int, length: int) -> Value:
    """The value narrowed in one dimension."""
    dims = list(found.dims)
    dim %= len(dims)
    axes = flat(dims[dim])
    if not axes:
        raise NoMatch
    if len(axes) > 1 or same(axes[0].size, length):
        if start == 0 and same(length, _size(axes)):
            return found
        raise NoMatch
    old, new = axes[0], Axis(length)

    def narrowed(factor: Factor) -> Factor:
        if isinstance(factor, Applied):
            inner = factor.value
            kept = tuple(tuple(new if axis is old else axis for axis in flat(d)) for d in inner.dims)
            return Applied(factor.name, Value(tuple(narrowed(f) for f in inner.factors), kept, inner.scale))
        if isinstance(factor, Gather) and any(old in leaf.axes() for leaf in factor.index):
            raise NoMatch
        refs = tuple(tuple(Ref(new, r.start + start, r.extent) if r.axis is old else r for r in d) for d in factor.dims())
        return replace(factor, refs=refs)

    dims[dim] = () if length == 1 else (new,)
    return Value(tuple(narrowed(f) for f in found.factors), tuple(dims), found.scale)


def _size(axes: Sequence[Axis]) -> Any:
    size: Any = 1
    for axis in axes:
        size = size * axis.size
    return size


def multiply(left: Value, right: Value) -> Value:
    """Elementwise product, broadcast."""
    check_apart(left, right)
    rank = max(len(left.dims), len(right.dims))
    padded = [((),) * (rank - len(v.dims)) + v.dims for v in (left, right)]
    dims = []
    for a, b in zip(*padded):
        if a and b:
            unify(a, b)
        dims.append(flat(a or b))
    return distinct(Value((*left.factors, *right.factors), tuple(dims), left.scale * right.scale))


def check_apart(left: Value, right: Value) -> None:
    """What one of two factors sums over is not an axis of the other: one name for two indices. Raises: NoMatch."""
    for a, b in ((left, right), (right, left)):
        if a.summed() & (b.bound() | set(b.axes())):
            raise NoMatch


def distinct(found: Value) -> Value:
    """The value, unless an axis runs along two of its dimensions."""
    axes = found.axes()
    if len(set(axes)) != len(axes):
        raise Abandoned  # a diagonal
    return found


def leaves(found: Value) -> Iterator[Leaf]:
    """Every leaf of a value, those inside functions too."""
    for factor in found.factors:
        if isinstance(factor, Applied):
            yield from leaves(factor.value)
        else:
            yield factor
