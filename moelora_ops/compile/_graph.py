"""What several rewrites ask of a graph."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from ._inductor import CASTS, IDS, RESHAPES, aten, plain, value

_MOST = 400  # nodes behind one that are looked at: an activation or a weighted sum is nearer


def behind(source: Node) -> list[Node]:
    """The nodes that depend on `source`, it included, in the order of the graph; not many of them."""
    found, node = {source: None}, source
    for _ in range(_MOST):
        node = node.next
        if node.op in ("output", "root"):
            break
        if any(n in found for n in node.all_input_nodes):
            found[node] = None
    return list(found)


def between(source: Node, last: Node) -> set[Node]:
    """The nodes on a path from `source` to `last`, both included."""
    dependent = set(behind(source))
    found, todo = {last}, [last]
    while todo:
        for node in todo.pop().all_input_nodes:
            if node in dependent and node not in found:
                found.add(node)
                todo.append(node)
    return found


def used_elsewhere(nodes: set[Node], last: Node) -> bool:
    """Whether anything but `last` leaves a set of nodes: what it computes on the way is then needed anyway."""
    return any(user not in nodes and not _unread(user) for node in nodes - {last} for user in node.users)


def _unread(node: Node) -> bool:
    return node.op != "output" and all(_unread(user) for user in node.users)


def ids_behind(node: Node) -> Node:
    """The node that ids come from, behind casts between int32 and int64: all others make new numbers of them."""
    while node.target in CASTS and value(node).dtype in IDS and value(node.args[0]).dtype in IDS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def not_negative(node: Node) -> bool:
    """Whether ids are known not to be negative."""
    node = _behind_views(node)
    if node.target is aten.clamp_min.default:
        return bool(node.args[1] >= 0)  # type: ignore[operator]
    if node.target is aten.clamp.default:
        return node.args[1] is not None and bool(node.args[1] >= 0)  # type: ignore[operator]
    return _chosen_from(node) is not None


def below(node: Node, size: int) -> bool:
    """Whether ids are known to lie in [0, size)."""
    node = _behind_views(node)
    if node.target is aten.clamp.default:
        least, most = (*node.args[1:], None, None)[:2]
        return least is not None and most is not None and 0 <= least and most < size  # type: ignore[operator, return-value]
    chosen = _chosen_from(node)
    return isinstance(chosen, int) and chosen <= size


def _behind_views(node: Node) -> Node:
    while node.target in (*CASTS, *RESHAPES, aten.unsqueeze.default, aten.expand.default, aten.slice.Tensor):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _chosen_from(node: Node) -> Any:
    """How many there were to choose from where ids are the indices of topk or sort; None for other ids."""
    if node.target is not operator.getitem or node.args[1] != 1 or not isinstance(node.args[0], Node):
        return None
    chooser = node.args[0]
    if chooser.target is aten.topk.default:
        dim = chooser.args[2] if len(chooser.args) > 2 else -1
    elif chooser.target is aten.sort.default:
        dim = chooser.args[1] if len(chooser.args) > 1 else -1
    else:
        return None
    return plain(value(chooser.args[0]).shape[dim])  # type: ignore[index]


def structure(item: Any) -> Any:
    """Equal for arguments with equal values: small steps of integer arithmetic and views are looked into."""
    if isinstance(item, Node):
        root = item
        while root.target in _VIEWS:
            root = root.args[0]  # type: ignore[assignment]
        if root is not item:
            sizes, before = (tuple(map(plain, value(node).shape)) for node in (item, root))
            return structure(root) if sizes == before else ("view", structure(root), repr(sizes))
        if item.target not in _SMALL:
            return item.name
        return str(item.target), structure(item.args), tuple((k, structure(v)) for k, v in sorted(item.kwargs.items()))
    if isinstance(item, (list, tuple)):
        return tuple(structure(i) for i in item)
    return type(item).__name__, repr(item)


_VIEWS = (*RESHAPES, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
_SMALL = (
    *CASTS, aten.expand.default, aten.clone.default, aten.where.self,
    aten.clamp_min.default, aten.clamp.default, aten.lt.Scalar, aten.ge.Scalar, aten.add.Tensor, aten.mul.Tensor,
    aten.bitwise_not.default, aten.full.default, aten.sym_size.int,
)  # fmt: skip

