"""The rules by which nodes of Inductor's post-grad graph are read as values of `_algebra`."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any, Callable, Sequence

import torch
from torch.fx import Node

from ._algebra import Abandoned, Applied, Axis, Dims, Gather, Leaf, NoMatch, Ref, Value, check_apart, distinct, flat, key
from ._algebra import multiply, part_of, regroup, unify
from ._grouped import read_grouped, sorted_by
from ._inductor import CASTS, IDS, RESHAPES, arguments, aten, plain, same, value

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Reader:
    """Reads nodes as values. One for each attempt at a match: axes that were identified stay so."""

    def __init__(self) -> None:
        self.known: dict[Node, Value] = {}
        self.read: set[Node] = set()  # nodes that were understood, not leaves

    def __call__(self, node: Node) -> Value:
        found = self.known.get(node)
        if found is None:
            try:
                rule = _RULES.get(node.target) if node.op == "call_function" else None
                if rule is None:
                    raise NoMatch
                found = rule(self, node, *node.args)
                _check_shape(node, found)
                self.read.add(node)
            except Abandoned:
                raise
            except (NoMatch, TypeError, ArithmeticError):  # arguments that the rule does not know; x / 0
                found = self.leaf(node)
            self.known[node] = found
        return found

    @staticmethod
    def leaf(node: Node) -> Value:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise Abandoned
        dims = tuple(() if same(size, 1) else (Axis(plain(size)),) for size in value(node).shape)
        refs = tuple(tuple(Ref(axis, 0, axis.size) for axis in dim) for dim in dims)
        return Value((Leaf(node, refs),), dims)


def _check_shape(node: Node, found: Value) -> None:
    """A rule may not have seen that another argument broadcasts its value. Raises: NoMatch."""
    sizes = [math.prod(axis.size for axis in flat(dim)) for dim in found.dims]
    if len(sizes) != value(node).dim() or not all(same(a, b) for a, b in zip(sizes, value(node).shape)):
        raise NoMatch


def _float(node: Node) -> None:
    if value(node).dtype not in FLOATS:
        raise NoMatch


def _reshape(read: Reader, node: Node, source: Node, *_: Any) -> Value:
    return regroup(read(source), value(node).shape)


def _same(read: Reader, node: Node, source: Node, *_: Any) -> Value:
    return read(source)


def _cast(read: Reader, node: Node, source: Node, *_: Any) -> Value:
    old, new = value(source), value(node)
    widened = old.dtype == torch.int32 and new.dtype == torch.int64
    if old.device != new.device or not (widened or new.dtype in FLOATS and old.dtype in (*FLOATS, torch.bool)):
        raise NoMatch
    return read(source)


def _permute(read: Reader, node: Node, source: Node, order: Sequence[int]) -> Value:
    found = read(source)
    return replace(found, dims=tuple(found.dims[i] for i in order))


def _transpose(read: Reader, node: Node, source: Node, *pair: int) -> Value:
    found = read(source)
    dims = list(found.dims)
    i, j = pair or (0, -1)
    dims[i], dims[j] = dims[j], dims[i]
    return replace(found, dims=tuple(dims))


def _expand(read: Reader, node: Node, source: Node, *_: Any) -> Value:
    found, shape = read(source), value(node).shape
    dims = ((),) * (len(shape) - len(found.dims)) + found.dims
    return replace(found, dims=tuple(d or (() if same(s, 1) else (Axis(plain(s)),)) for d, s in zip(dims, shape)))


def _slice(read: Reader, node: Node, source: Node, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    length = plain(value(node).shape[dim])
    if step != 1 or not isinstance(start or 0, int) or (start or 0) < 0 or not isinstance(length, int):
        if not same(length, value(source).shape[dim]):
            raise NoMatch
        return read(source)
    return part_of(read(source), dim, start or 0, length)


def _select(read: Reader, node: Node, source: Node, dim: int, index: int) -> Value:
    found = part_of(read(source), dim, index if index >= 0 else index + int(value(source).shape[dim]), 1)
    return regroup(found, value(node).shape)


def _item(read: Reader, node: Node, source: Node, index: int) -> Value:
    """One piece of a split, or of an unbind."""
    if source.target is aten.unbind.int:
        tensor, *rest = arguments(source)
        return _select(read, node, tensor, rest[0] if rest else 0, index)
    if source.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        raise NoMatch
    tensor, _, *rest = arguments(source)
    dim = rest[0] if rest else 0
    pieces = [plain(piece.shape[dim]) for piece in source.meta["val"]]
    return part_of(read(tensor), dim, sum(pieces[:index]), pieces[index])


def _mul(read: Reader, node: Node, left: Any, right: Any) -> Value:
    _float(node)
    for one, other in ((left, right), (right, left)):
        if isinstance(one, (int, float)):
            found = read(other)
            return replace(found, scale=found.scale * one)
    return multiply(read(left), read(right))


def _div(read: Reader, node: Node, left: Any, right: Any) -> Value:
    _float(node)
    if isinstance(right, (int, float)):
        return replace(read(left), scale=read(left).scale / right)
    return multiply(read(left), _apply("sigmoid", _logistic(read, right)))


def _logistic(read: Reader, node: Node) -> Value:
    """x of 1 + exp(-x)."""
    exp, minus = _plus(node, 1), None
    if exp is not None and exp.target is aten.exp.default:
        minus = uncast(exp.args[0])
    if minus is None or minus.target is not aten.neg.default:
        raise NoMatch
    return read(minus.args[0])


def _plus(node: Any, number: float) -> Node | None:
    """x of x + number."""
    node = uncast(node)
    if node.target in (aten.add.Tensor, aten.add.Scalar) and not node.kwargs:
        if node.args[1] == number:
            found: Node = uncast(node.args[0])
            return found
    return None


def uncast(node: Any) -> Any:
    """The node behind changes of floating-point precision."""
    while isinstance(node, Node) and node.target in CASTS and value(node.args[0]).dtype in FLOATS:
        node = node.args[0]
    return node


def _apply(name: str, found: Value) -> Value:
    """A function of a value. Of a sum none is known: its axis would pass for one of the result."""
    if found.summed():
        raise NoMatch
    return Value((Applied(name, found),), found.dims)


def _sigmoid(read: Reader, node: Node, source: Node) -> Value:
    return _apply("sigmoid", read(source))


def _reciprocal(read: Reader, node: Node, source: Node) -> Value:
    return _apply("sigmoid", _logistic(read, source))


def _relu(read: Reader, node: Node, source: Node) -> Value:
    return _apply("relu", read(source))


def _square(read: Reader, node: Node, source: Node, exponent: Any) -> Value:
    if exponent not in (2, 3):
        raise NoMatch
    found = read(source)
    if found.summed():
        raise NoMatch
    return Value(found.factors * int(exponent), found.dims, found.scale ** int(exponent))


def _add(read: Reader, node: Node, left: Any, right: Any) -> Value:
    """1 + erf(x / sqrt 2) and 1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)), the halves of gelu; no other sum is understood."""
    _float(node)
    inner = _plus(node, 1)
    if inner is None or inner.target not in (aten.erf.default, aten.tanh.default):
        raise NoMatch
    if inner.target is aten.erf.default:
        return _apply("erf", _scaled_back(read(arguments(inner)[0]), 0.5**0.5))
    scaled = uncast(inner.args[0])
    if scaled.target is not aten.mul.Tensor or not _close(scaled.args[1], (2 / torch.pi) ** 0.5):
        raise NoMatch
    polynomial = uncast(scaled.args[0])
    if polynomial.target is not aten.add.Tensor or polynomial.kwargs:
        raise NoMatch
    x, cube = read(polynomial.args[0]), _scaled_back(read(polynomial.args[1]), 0.044715)
    if x.scale != 1.0 or sorted(map(key, cube.factors), key=repr) != sorted(map(key, x.factors * 3), key=repr):
        raise NoMatch
    if cube.axes() != x.axes():  # a sum of cubes
        raise NoMatch
    return _apply("tanh", x)


def _scaled_back(found: Value, scale: float) -> Value:
    if not _close(found.scale, scale):
        raise NoMatch
    return replace(found, scale=1.0)


def _close(number: Any, wanted: float) -> bool:
    return isinstance(number, (int, float)) and abs(number - wanted) < 1e-6 * wanted


def _where(read: Reader, node: Node, mask: Node, left: Any, right: Any) -> Value:
    """A value where the mask holds and zero elsewhere, or the other way round."""
    _float(node)
    for kept, zero, negated in ((left, right, False), (right, left, True)):
        if constant(zero) == 0:
            condition = read(mask)
            if len(condition.factors) != 1 or not isinstance(condition.factors[0], Leaf):
                raise NoMatch
            leaf = replace(condition.factors[0], negated=condition.factors[0].negated ^ negated)
            condition = replace(condition, factors=(leaf,))
            if constant(kept) is not None:
                return replace(condition, scale=constant(kept))
            return multiply(condition, read(kept))
    raise NoMatch


def constant(node: Any) -> Any:
    """The number that fills a tensor, or None."""
    node = uncast(node)
    if isinstance(node, Node):
        return node.args[1] if node.target in (aten.full.default, aten.full_like.default) else None
    return node if isinstance(node, (int, float)) else None


def _sum(read: Reader, node: Node, source: Node, dims: Sequence[int] | None = None, keepdim: bool = False) -> Value:
    _float(node)
    found = read(source)
    gone = {dim % len(found.dims) for dim in (dims if dims else range(len(found.dims)))}
    if not {axis for dim in gone for axis in flat(found.dims[dim])} <= found.bound():
        raise NoMatch
    kept = [() if i in gone else d for i, d in enumerate(found.dims) if keepdim or i not in gone]
    return replace(found, dims=tuple(kept))


def _bmm(read: Reader, node: Node, left: Node, right: Node) -> Value:
    a, b = read(left), read(right)
    check_apart(a, b)
    (batch, m, k), (other_batch, other_k, n) = a.dims, b.dims
    if set(flat(m)) & set(flat(n)):
        raise NoMatch
    unify(batch, other_batch)
    unify(k, other_k)
    if not set(flat(k)) <= a.bound() | b.bound():
        raise Abandoned
    both = Value((*a.factors, *b.factors), (flat(batch), flat(m), flat(k), flat(n)), a.scale * b.scale)
    distinct(both)
    return replace(both, dims=(both.dims[0], both.dims[1], both.dims[3]))


def _index(read: Reader, node: Node, source: Node, indices: Sequence[Any]) -> Value:
    indices = list(indices)
    if source.target is aten._grouped_mm.default and len(indices) == 1:
        order = sorted_by(indices[0])
        return read_grouped(read, source, _fails_without(order and order.vector))
    while indices and indices[-1] is None:
        indices.pop()
    if not indices or None in indices or any(value(i).dtype not in IDS for i in indices):
        raise NoMatch
    leaves: list[Leaf] = []
    merged: Value | None = None
    for index in indices:
        found = read(index)
        leaf = found.factors[0]
        if type(leaf) is not Leaf or len(found.factors) > 1 or found.scale != 1.0 or found.summed():
            raise NoMatch
        leaves.append(leaf)
        merged = found if merged is None else multiply(merged, found)
    assert merged is not None
    return _gathered(node, source, tuple(leaves), merged.dims)


def _index_put(read: Reader, node: Node, target: Node, indices: Sequence[Any], source: Node, accumulate: bool = False) -> Value:
    """Rows of a grouped product put back where they came from."""
    if source.target is not aten._grouped_mm.default or len(indices) != 1 or accumulate or len(value(node).shape) != 2:
        raise NoMatch
    if not all(same(a, b) for a, b in zip(value(node).shape, value(source).shape)):
        raise NoMatch
    return read_grouped(read, source, indices[0])


def _fails_without(node: Node | None) -> Node:
    if node is None:
        raise NoMatch
    return node


def _gathered(node: Node, source: Node, index: tuple[Leaf, ...], index_dims: Dims) -> Value:
    rest = Reader.leaf(source)
    (whole,) = rest.factors
    assert isinstance(whole, Leaf)
    left = len(index)
    if left == len(whole.refs):
        raise NoMatch  # a number for each index: a leaf as it stands
    return Value((Gather(source, whole.refs[left:], index=index),), (*index_dims, *rest.dims[left:]))


def _embedding(read: Reader, node: Node, weight: Node, index: Node, *_: Any) -> Value:
    return _index(read, node, weight, [index])


def _index_select(read: Reader, node: Node, source: Node, dim: int, index: Node) -> Value:
    if dim != 0:
        raise NoMatch
    return _index(read, node, source, [index])


_RULES: dict[Any, Callable[..., Value]] = {
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default), _reshape),
    **dict.fromkeys((aten.clone.default, aten.alias.default, aten.detach.default), _same),
    **dict.fromkeys(CASTS, _cast),
    **dict.fromkeys((aten.transpose.int, aten.t.default), _transpose),
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    operator.getitem: _item,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: _div,
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sigmoid.default: _sigmoid,
    aten.reciprocal.default: _reciprocal,
    aten.relu.default: _relu,
    aten.pow.Tensor_Scalar: _square,
    aten.where.self: _where,
    aten.sum.dim_IntList: _sum,
    aten.bmm.default: _bmm,
    aten.index.Tensor: _index,
    aten.embedding.default: _embedding,
    aten.index_select.default: _index_select,
    aten.index_put.default: _index_put,
}
