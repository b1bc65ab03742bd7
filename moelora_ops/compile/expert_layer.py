"""A whole expert layer around our ops, with base products that we can serve, turned into `fused_experts_lora`.

    align; base = W13[e] x; fused_moe_lora; act; base = W2[e] h; fused_moe_lora; sum over choices of w * ...

The base products may be gathered per pair (einsum, bmm or matmul on W[topk_ids]) or `torch._grouped_mm` on pairs sorted by
their expert. Ids must be known to lie in [0, E), as those of topk over the experts do: to PyTorch an id of -1 is the last
expert, to our op it is none. The weight may be in the second base product and its delta (`mul_routed_weight`), or in the sum;
a number before it becomes `routed_scaling_factor`. A of gate and up must be halves of one tensor, and B too. Nothing on the way
may have another reader.
"""

from __future__ import annotations

import operator
from typing import Any, Sequence

import torch
from torch.fx import Graph, Node

from ._algebra import Abandoned, Applied, Axis, Factor, Gather, Leaf, NoMatch, Value, key, unify
from ._graph import behind, below, between, ids_behind, structure, used_elsewhere
from ._inductor import DeltaCall, Emitter, arguments, contiguous, delta_calls, plain, replace, same, value
from ._reader import Reader
from .delta_activation import Activation


def rewrite(graph: Graph) -> int:
    """Apply to a graph; returns how often it fired."""
    calls = {call.result: call for call in delta_calls(graph)}
    return sum(not call.node._erased and _rewrite_one(graph, call, calls) for call in list(calls.values()))


def _rewrite_one(graph: Graph, down: DeltaCall, calls: dict[Node, DeltaCall]) -> bool:
    for root in behind(down.result):
        if root.op != "call_function" or getattr(root.meta.get("val"), "dtype", None) != value(down.base).dtype:
            continue
        try:
            layer = _Layer(root, down, calls)
            result = layer.emit(Emitter(graph, root))
        except (Abandoned, NoMatch):
            continue
        except (TypeError, ValueError):  # the op's own checks
            return False
        replace(graph, root, result)
        return True
    return False


class _Layer:
    """The tensors of an expert layer that ends in `root`. Raises: NoMatch where it is something else."""

    def __init__(self, root: Node, down: DeltaCall, calls: dict[Node, DeltaCall]) -> None:
        self.root = root
        self.read = read = Reader()
        base = read(down.base)
        self.up = self._first_call(base, calls)
        for node in (root, *(call.arguments[name] for call in (self.up, down) for name in ("hidden_states", "topk_weights"))):
            read(_node(node))  # all that identifies axes comes first: what is compared below stays as it is
        for call in (self.up, down):  # a sum runs along the axes of what is added
            unify(read(call.result).axes(), read(call.base).axes())
        self.pairs, self.inner = self._activation(base, down)
        self.w2, weight_factors = self._second_product(base)
        self._sum(root, down, weight_factors, base.scale / self.activation.scale)
        self.x, self.w13 = self._first_product()
        self._table(down)
        self._adapters(down)
        inside = between(self.up.result, root)
        if used_elsewhere(inside, root) or any(len(call.base.users) > 1 for call in (self.up, down)):
            raise NoMatch
        if not contiguous(value(root)):
            raise NoMatch

    def _first_call(self, base: Value, calls: dict[Node, DeltaCall]) -> DeltaCall:
        found = {leaf.node for factor in base.factors for leaf in _leaves(factor) if leaf.node in calls}
        if len(found) != 1:
            raise NoMatch
        return calls[found.pop()]

    def _activation(self, base: Value, down: DeltaCall) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
        own = [f for f in base.factors if any(leaf.node is self.up.result for leaf in _leaves(f))]
        activation = self.activation = Activation(own, self.up)
        hidden = self.read(_node(down.arguments["hidden_states"]))
        again = Activation(hidden.factors, self.up)
        axes = (*activation.pair_axes, *activation.column_axes)
        if hidden.axes() != axes or hidden.scale != again.scale or hidden.summed():
            raise NoMatch
        if (again.name, again.pair_axes, again.column_axes) != (activation.name, activation.pair_axes, activation.column_axes):
            raise NoMatch
        return activation.pair_axes, activation.column_axes

    def _second_product(self, base: Value) -> tuple[Gather, list[Factor]]:
        rest = [f for f in base.factors if all(leaf.node is not self.up.result for leaf in _leaves(f))]
        gathers = [f for f in rest if isinstance(f, Gather)]
        if len(gathers) != 1:
            raise NoMatch
        (w2,) = gathers
        columns = _axes(w2, 0)
        if base.axes() != (*self.pairs, *columns) or base.summed() != set(self.inner) or _axes(w2, 1) != self.inner:
            raise NoMatch
        self.out_axes = columns
        return w2, [f for f in rest if f is not w2]

    def _sum(self, root: Node, down: DeltaCall, in_base: list[Factor], base_scale: float) -> None:
        """The sum over choices, and where the weight is."""
        found = self.read(root)
        sums = [f for f in found.factors if isinstance(f, Leaf) and f.node is down.result]
        if len(sums) != 1 or sums[0].axes() != (*self.pairs, *self.out_axes) or not _whole(sums[0]):
            raise NoMatch
        outside = [f for f in found.factors if f is not sums[0]]
        top_k = plain(down.shape[1])
        kept = found.axes()[: len(found.axes()) - len(self.out_axes)]
        choices = self.pairs[len(kept) :]
        if found.axes() != (*kept, *self.out_axes) or self.pairs != (*kept, *choices) or not same(_size(choices), top_k):
            raise NoMatch
        self.tokens, self.routed_scaling_factor = kept, found.scale
        if down.arguments.get("mul_routed_weight"):
            self.weights = _node(down.arguments["topk_weights"])
            weights = self.read(self.weights)
            if outside or _keys(weights.factors) != _keys(in_base) or abs(base_scale - weights.scale) > 1e-6 * weights.scale:
                raise NoMatch
        else:
            if in_base or len(outside) != 1 or type(outside[0]) is not Leaf or abs(base_scale - 1.0) > 1e-6:
                raise NoMatch
            self.weights = outside[0].node
            weights = Value((outside[0],), ())
        if any(type(f) is not Leaf or f.axes() != self.pairs or not _whole(f) or f.negated for f in weights.factors):
            raise NoMatch
        if value(self.weights).dtype != torch.float32:
            raise NoMatch

    def _first_product(self) -> tuple[Node, Gather]:
        base = self.read(self.up.base)
        gathers = [f for f in base.factors if isinstance(f, Gather)]
        inputs = [f for f in base.factors if type(f) is Leaf]
        if len(base.factors) != 2 or len(gathers) != 1 or len(inputs) != 1 or base.scale != 1.0:
            raise NoMatch
        (w13,), (x,) = gathers, inputs
        rows, hidden = _axes(w13, 0), _axes(w13, 1)
        if base.axes() != (*self.pairs, *rows) or base.summed() != set(hidden) or not _whole(x):
            raise NoMatch
        if x.axes() != (*self.tokens, *hidden):
            raise NoMatch
        given = self.read(_node(self.up.arguments["hidden_states"]))
        if _keys(given.factors) != _keys([x]) or given.scale != 1.0:
            raise NoMatch
        return _node(self.up.arguments["hidden_states"]), w13

    def _table(self, down: DeltaCall) -> None:
        """Both deltas have the table of one alignment, of the ids that choose the base's weights."""
        aligns = set()
        for call in (self.up, down):
            for at, name in enumerate(("sorted_token_ids", "expert_ids", "num_tokens_post_padded")):
                item = _node(call.arguments[name])
                if item.target is not operator.getitem or item.args[1] != at:
                    raise NoMatch
                aligns.add(item.args[0])
        if len({structure((a.args, a.kwargs)) for a in aligns}) != 1:  # type: ignore[union-attr]
            raise NoMatch
        align = aligns.pop()
        if not isinstance(align, Node) or align.target is not torch.ops.moelora.moe_lora_align_block_size.default:
            raise NoMatch
        self.ids, self.mapping, num_experts, _, self.max_loras = arguments(align)
        self.enabled = align.kwargs.get("adapter_enabled")
        if align.kwargs.get("expert_map") is not None:
            raise NoMatch
        for gather in (self.w13, self.w2):
            if len(gather.index) != 1 or not _whole(gather) or not same(value(gather.node).shape[0], num_experts):
                raise NoMatch
            (index,) = gather.index
            if ids_behind(index.node) is not ids_behind(_node(self.ids)) or not below(_node(self.ids), num_experts):
                raise NoMatch
            if index.axes() != self.pairs or not _whole(index):
                raise NoMatch

    def _adapters(self, down: DeltaCall) -> None:
        up = self.up.arguments
        slices = 2 if self.activation.gated else 1
        if any(call.arguments.get("offset", 0) != 0 for call in (self.up, down)) or up.get("mul_routed_weight"):
            raise NoMatch
        if len(up["lora_a_stacked"]) != slices or len(down.arguments["lora_a_stacked"]) != 1:
            raise NoMatch
        self.ranks = up.get("lora_ranks")
        if down.arguments.get("lora_ranks") is not self.ranks:
            raise NoMatch
        self.lora = (
            self._whole_of(up["lora_a_stacked"]), self._whole_of(up["lora_b_stacked"]),
            down.arguments["lora_a_stacked"][0], down.arguments["lora_b_stacked"][0],
        )  # fmt: skip
        if not all(same(value(t).shape[0], self.max_loras) for t in self.lora):
            raise NoMatch

    def _whole_of(self, parts: Sequence[Node]) -> Node:
        """The tensor whose dimension 2 is cut into these parts, in order."""
        if len(parts) == 1:
            return parts[0]
        found = [self.read(part).factors for part in parts]
        if any(len(factors) != 1 or type(factors[0]) is not Leaf for factors in found):
            raise NoMatch
        leaves: list[Leaf] = [factors[0] for factors in found]  # type: ignore[misc]
        start = 0
        for leaf, part in zip(leaves, parts):
            ours = [ref for dim in leaf.dims() for ref in dim]
            if leaf.node is not leaves[0].node or len(leaf.refs) != 4 or len(leaf.dims()[2]) != 1:
                raise NoMatch
            (cut,) = leaf.dims()[2]
            if cut.start != start or not all(ref.whole for ref in ours if ref is not cut):
                raise NoMatch
            if value(part).dim() != 4 or not same(value(part).shape[2], cut.axis.size):
                raise NoMatch
            start += cut.axis.size
        if not same(start, value(leaves[0].node).shape[2]):
            raise NoMatch
        return leaves[0].node

    def emit(self, emit: Emitter) -> Node:
        """The layer's output in the shape of the root."""
        out = emit(
            torch.ops.moelora.fused_experts_lora.default, self.x, self.w13.node, self.w2.node, self.weights, self.ids,
            self.mapping, *self.lora, lora_ranks=self.ranks, adapter_enabled=self.enabled, activation=self.activation.name,
            gated=self.activation.gated, routed_scaling_factor=float(self.routed_scaling_factor),
        )  # fmt: skip
        return emit.reshape(out, value(self.root).shape)


def _node(item: Any) -> Node:
    if not isinstance(item, Node):
        raise NoMatch
    return item


def _leaves(factor: Factor) -> list[Leaf]:
    if isinstance(factor, Applied):
        return [leaf for inner in factor.value.factors for leaf in _leaves(inner)]
    return [factor]


def _keys(factors: Sequence[Factor]) -> list[Any]:
    return sorted(map(key, factors), key=repr)


def _whole(leaf: Leaf) -> bool:
    return all(ref.whole for ref in leaf.all_refs())


def _axes(leaf: Leaf, dim: int) -> tuple[Axis, ...]:
    return tuple(ref.axis for ref in leaf.dims()[dim])


def _size(axes: Sequence[Axis]) -> Any:
    size: Any = 1
    for axis in axes:
        size = size * axis.size
    return size

