"""Every private part of torch that the rewrites use, and what is known of it: import this file only when they are switched on.

Known for torch 2.11 to 2.14: `post_grad_custom_pre_pass` takes one `CustomGraphPass` (a list from 2.12 on), and a mutating op
stands in the graph as `auto_functionalized_v2`, one base for each tensor that it writes and how the argument lies in it.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..errors import UnsupportedError

KNOWN = ((2, 11), (2, 14))
_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
_UNKNOWN = (
    f"moelora_ops.compile rewrites graphs through private parts of torch, known for {KNOWN[0][0]}.{KNOWN[0][1]} to "
    f"{KNOWN[1][0]}.{KNOWN[1][1]}; this is torch {torch.__version__}: leave enable() out, the ops compile without it"
)
if not KNOWN[0] <= _VERSION <= KNOWN[1]:
    raise UnsupportedError(_UNKNOWN)
try:
    from torch._dispatch.python import enable_python_dispatcher
    from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
    from torch._inductor import config, custom_graph_pass
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
except ImportError as error:
    raise UnsupportedError(_UNKNOWN) from error

aten = torch.ops.aten
RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
IDS = (torch.int32, torch.int64)


# A pass that is told whether it sees an inference graph; not in every version. Ours is one so that a user's can be.
_InferenceAware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", ())


class Pass(_InferenceAware or CustomGraphPass):  # type: ignore[misc]
    """The pass in Inductor's one slot: what the user had there first, then `rewrite`."""

    def __init__(self, rewrite: Callable[[Graph], None], names: Sequence[str], before: Any) -> None:
        self.rewrite, self.names, self.before = rewrite, tuple(names), before

    def __call__(self, graph: Graph, is_inference: bool = True) -> None:
        for user_pass in _passes(self.before):
            user_pass(graph, **({"is_inference": is_inference} if isinstance(user_pass, _InferenceAware) else {}))
        self.rewrite(graph)

    def uuid(self) -> Any:
        """Hash of the files behind the rewrites; None, so that nothing is cached, where the user's pass has no uuid."""
        theirs = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in _passes(self.before)]
        if None in theirs:
            return None
        package = Path(__file__).parent.parent
        files = (*Path(__file__).parent.glob("*.py"), *(package / "ops").glob("*.py"))
        return get_hash_for_files(tuple(str(file) for file in sorted(files)), repr((self.names, theirs)))


def _passes(setting: Any) -> Sequence[Any]:
    return () if setting is None else setting if isinstance(setting, (list, tuple)) else (setting,)


def install(rewrite: Callable[[Graph], None], names: Sequence[str]) -> Pass:
    """Put a pass into the slot, behind whatever is there."""
    installed = Pass(rewrite, names, config.post_grad_custom_pre_pass)
    config.post_grad_custom_pre_pass = installed
    return installed


def remove(installed: Pass) -> None:
    """Take a pass out again, also from behind a later one of ours; what somebody else put there meanwhile stays.

    Where somebody puts it back (a `config.patch` that ends later), it does nothing.
    """
    installed.rewrite, installed.names = lambda graph: None, ()
    if config.post_grad_custom_pre_pass is installed:
        config.post_grad_custom_pre_pass = installed.before
        return
    later = config.post_grad_custom_pre_pass
    while isinstance(later, Pass):
        if later.before is installed:
            later.before = installed.before
        later = later.before


class DeltaCall(NamedTuple):
    """A functionalised `fused_moe_lora` in a graph."""

    node: Node
    base: Node  # what it adds to
    shape: tuple[Any, ...]  # of the base as its argument `output`
    result: Node  # the sum, with the shape of `base`
    arguments: dict[str, Any]  # all others by name


def delta_calls(graph: Graph) -> Iterator[DeltaCall]:
    """Those whose output is the whole of a contiguous tensor, in the order of the graph."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (auto_functionalized, auto_functionalized_v2):
            continue
        if node.args[0] is not torch.ops.moelora.fused_moe_lora.default:
            continue
        found = _delta_call(node)
        if found is not None:
            yield found


def _delta_call(node: Node) -> DeltaCall | None:
    given: dict[str, Any] = {name: item for name, item in node.kwargs.items() if not name.startswith("_")}
    shape: Any
    if node.target is auto_functionalized:
        base = given.pop("output")
        shape = value(base).shape
    else:
        how: dict[str, Any] = {name: item for name, item in node.kwargs.items() if name.startswith("_")}
        bases = how.pop("_all_bases")
        if not isinstance(bases, (list, tuple)) or len(bases) != 1 or how.pop("_output_base_index", None) != 0:
            return None
        base = bases[0]
        val = value(base)
        shape = how.pop("_output_size", val.shape)
        shape = tuple(s.meta["val"] if isinstance(s, Node) else s for s in shape)
        offset, stride = how.pop("_output_storage_offset", 0), how.pop("_output_stride", None)
        stride = stride and tuple(s.meta["val"] if isinstance(s, Node) else s for s in stride)
        if how or offset != 0 or not contiguous(val) or not _fills(shape, stride, val):
            return None
    users = [user for user in node.users if user.target is operator.getitem]
    results = [user for user in users if user.args[1] == 1]
    if len(results) != 1 or len(users) != len(node.users) or any(u.args[1] == 0 and u.users for u in users):
        return None
    return DeltaCall(node, base, tuple(shape), results[0], given)


def _fills(shape: Sequence[Any], stride: Sequence[Any] | None, base: Tensor) -> bool:
    """Whether a view of this shape and stride is a reshape of a contiguous base."""
    if stride is None:
        return len(shape) == base.dim() and all(same(a, b) for a, b in zip(shape, base.shape))
    want: Any = 1
    for size, step in zip(reversed(shape), reversed(stride)):
        if not same(size, 1) and not same(step, want):
            return False
        want = want * plain(size)
    return same(want, _product(base.shape))


def _product(sizes: Sequence[Any]) -> Any:
    result: Any = 1
    for size in sizes:
        result = result * plain(size)
    return result


def plain(size: Any) -> Any:
    """A size as an int or a symbolic expression; both can be multiplied, divided and compared without a guard."""
    if isinstance(size, torch.SymInt):
        expression = size.node.expr
        return int(expression) if expression.is_number else expression
    return size


def same(left: Any, right: Any) -> bool:
    """Whether two sizes are equal whatever the symbols stand for."""
    return bool(plain(left) == plain(right))


def quotient(whole: Any, part: Any) -> Any:
    """whole / part where that is an integer whatever the symbols stand for, else None."""
    whole, part = plain(whole), plain(part)
    if isinstance(whole, int) and isinstance(part, int):
        return whole // part if part and whole % part == 0 else None
    ratio = whole / part
    if ratio.is_number and ratio.is_integer:
        return int(ratio)
    return ratio if ratio.is_integer is True else None


def value(node: Any) -> Tensor:
    """The fake tensor of a node."""
    found: Tensor = node.meta["val"]
    return found


def arguments(node: Node) -> tuple[Any, ...]:
    """A node's positional arguments, which may be anything."""
    return node.args


def contiguous(tensor: Tensor) -> bool:
    """Whether strides are those of a contiguous tensor, whatever the symbols stand for."""
    want: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        if not same(size, 1):
            if not same(stride, want):
                return False
            want = want * plain(size)
    return True


class Emitter:
    """Adds nodes before a place in a graph, each with its fake value."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self.graph, self.before, self.mode = graph, before, value(before).fake_mode  # type: ignore[attr-defined]

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        fakes = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        try:
            with self.mode, enable_python_dispatcher():
                node.meta["val"] = target(*fakes[0], **fakes[1])
        except (TypeError, ValueError):  # the op's own checks: it cannot serve this
            self.graph.erase_node(node)
            raise
        return node

    def item(self, node: Node, index: int) -> Node:
        """One of several results."""
        with self.graph.inserting_before(self.before):
            item = self.graph.call_function(operator.getitem, (node, index))
        item.meta["val"] = node.meta["val"][index]
        return item

    def full(self, shape: Sequence[int | Node], number: float, dtype: torch.dtype) -> Node:
        """A tensor of one number; a node in the shape stands for its first size."""
        sizes: list[Any] = []
        for size in shape:
            if isinstance(size, Node):
                first = plain(value(size).shape[0])
                size = first if isinstance(first, int) else self(aten.sym_size.int, size, 0)
            sizes.append(size)
        options = {"dtype": dtype, "layout": torch.strided, "device": value(self.before).device, "pin_memory": False}
        return self(aten.full.default, sizes, number, **options)

    def reshape(self, node: Node, shape: Sequence[Any]) -> Node:
        """`shape` has at most one size that is not an int."""
        sizes = [plain(size) for size in shape]
        if len(sizes) == value(node).dim() and all(s == -1 or same(s, t) for s, t in zip(sizes, value(node).shape)):
            return node
        return self(aten.reshape.default, node, [size if isinstance(size, int) else -1 for size in sizes])

    def delta(self, output: Node, **arguments: Any) -> Node:
        """output + the adapters' delta, written in place where nothing else needs the output."""
        op = torch.ops.moelora.fused_moe_lora.default
        call = self(auto_functionalized, op, output=output, **arguments)
        return self.item(call, 1)


def replace(graph: Graph, old: Node, new: Node) -> None:
    """Let the users of `old` read `new`, and drop what nobody reads any more."""
    old.replace_all_uses_with(new)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and _is_pure(node):
            graph.erase_node(node)


def _is_pure(node: Node) -> bool:
    if node.target in (operator.getitem, auto_functionalized, auto_functionalized_v2):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable and not node.is_impure()
