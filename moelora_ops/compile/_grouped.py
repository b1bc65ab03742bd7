"""`torch._grouped_mm` over pairs sorted by their expert, read as the gathered product that it is in the order of the pairs.

    order = ids.sort(); y = _grouped_mm(x[order // K], W, ends of each expert's rows); y[order.argsort()] or out[order] = y

is sum over h of x[pair, h] * W[ids[pair], h, n]. Rows of ids outside [0, E) are undefined in y: whoever uses this sees to
the ids.
"""

from __future__ import annotations

import operator
from typing import Any, Callable, NamedTuple

import torch
from torch.fx import Node

from ._algebra import Axis, Gather, Leaf, NoMatch, Value, flat, unify
from ._inductor import CASTS, IDS, RESHAPES, arguments, aten, plain, quotient, same, value

Read = Callable[[Node], Value]


class Sort(NamedTuple):
    """An ascending sort of a vector."""

    call: Node
    vector: Node  # what was sorted


def sorted_by(node: Any) -> Sort | None:
    """The sort whose second result a node is; in it, the vector that was sorted."""
    while isinstance(node, Node) and node.target in CASTS:
        node = node.args[0]
    if not isinstance(node, Node) or node.target is not operator.getitem or node.args[1] != 1:
        return None
    call = node.args[0]
    assert isinstance(call, Node)
    if call.target is aten.sort.default:
        descending = call.args[2] if len(call.args) > 2 else call.kwargs.get("descending", False)
    elif call.target is aten.sort.stable:
        descending = call.kwargs.get("descending", False)
    else:
        return None
    (vector,) = call.args[:1]
    assert isinstance(vector, Node)
    return None if descending or value(vector).dim() != 1 else Sort(call, vector)


def read_grouped(read: Read, product: Node, permutation: Node) -> Value:
    """The product in the order of the pairs, which `permutation` sorts. Raises: NoMatch where the sort is not by the groups."""
    order = sorted_by(permutation)
    if order is None or len(product.args) != 3 or any(v is not None for v in product.kwargs.values()):
        raise NoMatch
    rows, weight, ends = product.args
    assert isinstance(rows, Node) and isinstance(weight, Node) and isinstance(ends, Node)
    w = read(weight)
    leaf = w.factors[0]
    if len(w.factors) != 1 or type(leaf) is not Leaf or w.scale != 1.0 or len(w.dims) != 3 or len(leaf.refs) != 3:
        raise NoMatch
    if not _are_ends(ends, order, plain(value(weight).shape[0])):
        raise NoMatch
    experts, contracted, columns = w.dims
    if tuple(ref.axis for ref in leaf.dims()[0]) != flat(experts):
        raise NoMatch
    ids = read(order.vector)
    index = ids.factors[0]
    if len(ids.factors) != 1 or type(index) is not Leaf or ids.scale != 1.0:
        raise NoMatch
    x = _read_rows(read, rows, order, ids)
    unify(x.dims[1], contracted)
    gather = Gather(leaf.node, leaf.refs[1:], index=(index,))
    return Value((*x.factors, gather), (flat(ids.dims[0]), flat(columns)), x.scale)


def _read_rows(read: Read, rows: Node, order: Sort, ids: Value) -> Value:
    """Rows of pairs, x[order], or of tokens, x[order // K], in the order of the pairs."""
    if rows.target is not aten.index.Tensor or len(rows.args[1]) != 1:  # type: ignore[arg-type]
        raise NoMatch
    source, (index,) = arguments(rows)
    assert isinstance(source, Node) and isinstance(index, Node)
    top_k = 1
    if index.target is aten.div.Tensor_mode and index.kwargs.get("rounding_mode") == "floor":
        index, top_k = index.args  # type: ignore[assignment]
    elif index.target is aten.floor_divide.default:
        index, top_k = index.args  # type: ignore[assignment]
    by = sorted_by(index)
    if by is None or by.call is not order.call or not isinstance(top_k, int):
        raise NoMatch
    num_tokens = quotient(value(order.vector).shape[0], top_k)
    x = read(source)
    if len(x.dims) != 2 or num_tokens is None or not same(num_tokens, value(source).shape[0]):
        raise NoMatch
    tokens = Axis(num_tokens)
    unify(ids.dims[0], [axis for axis in (tokens, Axis(top_k)) if not same(axis.size, 1)])
    unify(x.dims[0], [] if same(num_tokens, 1) else [tokens])
    return x


def _are_ends(node: Node, order: Sort, num_experts: Any) -> bool:
    """Whether a vector holds the number of sorted ids up to each expert: a running sum of counts, or a search."""
    node = _uncast(node)
    if node.target is aten.cumsum.default and node.args[1] in (0, -1):
        counts = _uncast(node.args[0])
        if counts.target is not aten.histc.default or tuple(counts.args[1:]) != (num_experts, 0, num_experts - 1):
            return False
        counted = _uncast(counts.args[0])
        return _is_sorted(counted, order) or value(counted).dtype in IDS and counted is _uncast(order.vector)
    if node.target is not aten.searchsorted.Tensor:
        return False
    right = node.kwargs.get("right", False) or node.kwargs.get("side") == "right"
    wanted = _uncast(node.args[1])
    iota = wanted.target is torch.ops.prims.iota.default and wanted.args[0] == num_experts
    iota = iota and wanted.kwargs.get("start") == 0 and wanted.kwargs.get("step") == 1
    return bool(right and iota and _is_sorted(_uncast(node.args[0]), order))


def _is_sorted(node: Node, order: Sort) -> bool:
    return node.target is operator.getitem and node.args == (order.call, 0)


def _uncast(node: Any) -> Node:
    """The node behind casts and views: neither changes the numbers of a vector of ids."""
    while node.target in (*CASTS, *RESHAPES):
        node = node.args[0]
    return node  # type: ignore[no-any-return]
