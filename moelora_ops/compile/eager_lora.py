"""LoRA on experts as people write it first, in plain PyTorch, turned into align and `fused_moe_lora`.

    base + scale * mask * B[l, e] (A[l, e] x)    becomes    fused_moe_lora(base, x, [A], [B], weights, *align(e, l))

However it is spelled: A[l, e] or a flattened table with l * E + e, einsum, bmm, matmul or a product and a sum, the scale a
number or a tensor per token, the mask a `where` or a product. What -1 means is kept: an index of -1 is Python's, the last
entry, so ids that may be negative are wrapped before the alignment sees them; under a mask `l >= 0` they are none, as for the
op. All other masks and scales go into the op's weights. Neither A[l, e], B[l, e] nor a product of them may have another
reader.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch.fx import Graph, Node

from ._algebra import Abandoned, Applied, Axis, Gather, Leaf, NoMatch, Value, key
from ._graph import ids_behind, not_negative, used_elsewhere
from ._inductor import IDS, Emitter, aten, contiguous, plain, replace, same, value
from ._reader import Reader, constant

BLOCK_SIZE = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rewrite(graph: Graph) -> int:
    """Apply to a graph; returns how often it fired."""
    gathers = sum(node.target in (aten.index.Tensor, aten.embedding.default) for node in graph.nodes)
    if gathers < 2:
        return 0
    sums = [node for node in graph.nodes if node.target is aten.add.Tensor and len(node.args) == 2]
    return sum(not node._erased and _rewrite_one(graph, node) for node in sums)


def _rewrite_one(graph: Graph, node: Node) -> bool:
    for base, delta in (node.args, node.args[::-1]):
        if not isinstance(base, Node) or not isinstance(delta, Node) or base is delta:
            continue
        try:
            found = _EagerDelta(node, base, delta)
        except (Abandoned, NoMatch):
            continue
        emit = Emitter(graph, node)
        try:
            result = found.emit(emit)
        except (TypeError, ValueError):  # the op's own checks; what was added before has no reader
            return False
        replace(graph, node, result)
        return True
    return False


class _EagerDelta:
    """The tensors of base + delta. Raises: NoMatch where it is something else."""

    def __init__(self, node: Node, base: Node, delta: Node) -> None:
        self.node, self.base = node, base
        read = Reader()
        found = read(delta)
        alpha: Any = node.kwargs.get("alpha", 1)  # of the second operand
        self.scale = found.scale * alpha
        if node.kwargs and delta is not node.args[1]:
            raise NoMatch
        adapters = [f for f in found.factors if isinstance(f, Gather) and len(f.refs) == 2]
        if len(adapters) != 2:
            raise NoMatch
        self._find_axes(found, adapters)
        others = [f for f in found.factors if f not in (self.a, self.b)]
        inputs = [f for f in others if type(f) is Leaf and set(f.axes()) & set(self.in_axes)]
        if len(inputs) != 1:
            raise NoMatch
        self.x, self.factors = inputs[0], []
        for factor in others:
            if factor is not self.x:
                self.factors.append(self._weight(factor))
        self._find_index()
        self._check_input()
        self._check_tensors(read, delta)

    def _find_axes(self, found: Value, adapters: Sequence[Gather]) -> None:
        result = found.axes()
        owners = [f for f in adapters if set(_axes(f, 0)) & set(result) or not _axes(f, 0)]
        owners = [f for f in owners if set(_axes(f, 0)) == set(result[len(result) - len(_axes(f, 0)) :])]
        for self.b in owners:
            (self.a,) = (f for f in adapters if f is not self.b)
            self.out_axes, self.in_axes = _axes(self.b, 0), _axes(self.a, 1)
            self.pairs = result[: len(result) - len(self.out_axes)]
            rank = _axes(self.b, 1)
            summed = found.summed()
            if _axes(self.a, 0) == rank and self.in_axes and set(rank) | set(self.in_axes) == summed:
                if result[len(self.pairs) :] == self.out_axes and all(ref.whole for f in adapters for ref in f.all_refs()):
                    return
        raise NoMatch

    def _weight(self, factor: Any) -> Leaf:
        """A factor that is a number for each pair, token or choice."""
        if type(factor) is not Leaf or isinstance(factor, Applied):
            raise NoMatch
        if not set(factor.axes()) <= set(self.pairs) or not all(ref.whole for ref in factor.all_refs()):
            raise NoMatch
        return factor

    def _find_index(self) -> None:
        """Which index is the slot and which the expert, and the axes of tokens and choices."""
        a, b = self.a.index, self.b.index
        self.slot: Leaf | None
        if len(a) == len(b) == 1:  # one flat table of (slot, expert): experts of a single slot
            self.slot, self.expert = None, b[0]
            if key(a[0]) != key(b[0]):
                raise NoMatch
            tokens = tuple(axis for axis in self.x.axes() if axis in self.pairs)
        else:
            both = a if len(a) == 2 else b
            self.slot, self.expert = both
            tokens = self.slot.axes()
            for index in (a, b):
                if [key(leaf) for leaf in index] not in ([key(leaf) for leaf in both], [key(self.slot)]):
                    raise NoMatch
        if self.expert.axes() != self.pairs or self.pairs[: len(tokens)] != tokens:
            raise NoMatch
        self.tokens, self.choices = tokens, self.pairs[len(tokens) :]
        self.top_k = _size(self.choices)
        indices = [self.expert] + ([] if self.slot is None else [self.slot])
        if not all(ref.whole for leaf in indices for ref in leaf.all_refs()):
            raise NoMatch
        if any(value(leaf.node).dtype not in IDS for leaf in indices):
            raise NoMatch

    def _check_input(self) -> None:
        axes = self.x.axes()
        if axes not in ((*self.tokens, *self.in_axes), (*self.pairs, *self.in_axes)):
            raise NoMatch
        if self.x.refs[-1] == () or not all(ref.whole for ref in self.x.all_refs()):
            raise NoMatch

    def _check_tensors(self, read: Reader, delta: Node) -> None:
        dtype, out = value(self.node).dtype, value(self.node)
        for leaf in (self.x, self.a, self.b):
            if value(leaf.node).dtype != dtype:
                raise NoMatch
        if dtype not in DTYPES or value(self.base).dtype != dtype or not isinstance(self.top_k, int):
            raise NoMatch
        if not contiguous(out) or not contiguous(value(self.base)) or not contiguous(value(self.x.node)):
            raise NoMatch
        for term in (self.base, delta):  # neither is broadcast: with an unbacked batch the op would find out when it runs
            if len(out.shape) != value(term).dim() or not all(same(s, t) for s, t in zip(out.shape, value(term).shape)):
                raise NoMatch
        if any(value(factor.node).device != out.device for factor in self.factors):  # a scale on the CPU
            raise NoMatch
        if sum(not isinstance(plain(size), int) for size in out.shape) > 1:
            raise NoMatch
        if any(value(leaf.node).stride(-1) != 1 for leaf in (self.a, self.b)):
            raise NoMatch
        if any(not isinstance(plain(s), int) for leaf in (self.a, self.b) for s in value(leaf.node).shape):
            raise NoMatch
        products = {n for n in read.read if any(isinstance(f, Gather) and f in (self.a, self.b) for f in read(n).factors)}
        products |= {n for n in read.read if any(_same_gather(f, g) for f in read(n).factors for g in (self.a, self.b))}
        if used_elsewhere(products | {self.node}, self.node):
            raise NoMatch

    def emit(self, emit: Emitter) -> Node:
        """base + delta in the shape of the sum."""
        a, b = self._stacked(emit, self.a), self._stacked(emit, self.b)
        num_experts = max(int(value(t).shape[1]) for t in (a, b))
        num_slots = int(value(a).shape[0])
        factors = list(self.factors)
        expert = self._ids(emit, self.expert, [-1, self.top_k], num_experts, factors)
        if self.slot is None:
            mapping = emit.full([expert], 0, torch.int32)
        else:
            mapping = self._ids(emit, self.slot, [-1], num_slots, factors)
        aligned = emit(
            torch.ops.moelora.moe_lora_align_block_size.default, expert, mapping, num_experts, BLOCK_SIZE, num_slots
        )
        weights = emit.full([expert, self.top_k], self.scale, torch.float32)
        for factor in factors:
            weights = emit(aten.mul.Tensor, weights, self._factor(emit, factor))
        x = emit.reshape(self.x.node, [-1, _size(self.in_axes)])
        base = emit.reshape(self.base, [-1, self.top_k, _size(self.out_axes)])
        names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
        table = {name: emit.item(aligned, i) for i, name in enumerate(names)}
        result = emit.delta(
            base, hidden_states=x, lora_a_stacked=[a], lora_b_stacked=[b], topk_weights=weights, **table, lora_ranks=None,
            mul_routed_weight=self.scale != 1 or bool(factors), offset=0,
        )  # fmt: skip
        return emit.reshape(result, value(self.node).shape)

    def _stacked(self, emit: Emitter, gather: Gather) -> Node:
        """The tensor of A or B as [L, E or 1, ...]."""
        if len(gather.index) == 2:
            return gather.node
        return emit(aten.unsqueeze.default, gather.node, 0 if self.slot is None else 1)

    def _ids(self, emit: Emitter, leaf: Leaf, shape: Sequence[Any], size: int, factors: list[Leaf]) -> Node:
        """Ids as the alignment takes them: those that index [0, size), all others none."""
        raw = _unmasked(leaf.node, factors, leaf)
        if raw is not None:
            return emit.reshape(raw, shape)
        node = emit.reshape(leaf.node, shape)
        if not_negative(leaf.node):
            return node
        wrapped = emit(aten.add.Tensor, node, size)
        return emit(aten.where.self, emit(aten.lt.Scalar, node, 0), wrapped, node)

    def _factor(self, emit: Emitter, factor: Leaf) -> Node:
        """A factor as fp32, broadcastable to [T, K]."""
        axes = factor.axes()
        if axes == self.pairs:
            shape = [-1, self.top_k]
        elif axes == self.tokens:
            shape = [-1, 1]
        elif axes == self.choices:
            shape = [1, self.top_k]
        elif not axes:
            shape = [1, 1]
        else:
            raise ValueError("a factor in another order")
        node = emit(aten.bitwise_not.default, factor.node) if factor.negated else factor.node
        return emit(torch.ops.prims.convert_element_type.default, emit.reshape(node, shape), torch.float32)


def _axes(factor: Leaf, dim: int) -> tuple[Axis, ...]:
    return tuple(ref.axis for ref in factor.dims()[dim] if not same(ref.axis.size, 1))


def _size(axes: Sequence[Axis]) -> Any:
    size: Any = 1
    for axis in axes:
        size = size * axis.size
    return size


def _same_gather(factor: Any, gather: Gather) -> bool:
    return isinstance(factor, Gather) and factor.node is gather.node and factor.index == gather.index


def _unmasked(node: Node, factors: list[Leaf], leaf: Leaf) -> Node | None:
    """m of clamp(m, min=0) or where(m >= 0, m, 0), where a factor is the mask m >= 0, which is then taken out."""
    node = ids_behind(node)
    raw: Any = None
    if node.target is aten.clamp_min.default and node.args[1] == 0 or node.target is aten.relu.default:
        raw = node.args[0]
    elif node.target is aten.clamp.default and node.args[1:] == (0,):
        raw = node.args[0]
    elif node.target is aten.where.self and constant(node.args[2]) == 0 and _is_mask_of(node.args[0], node.args[1], False):
        raw = node.args[1]
    if raw is None or value(raw).dtype not in IDS:
        return None
    for factor in factors:
        if factor.axes() == leaf.axes() and _is_mask_of(factor.node, raw, factor.negated):
            factors.remove(factor)
            return raw  # type: ignore[no-any-return]
    return None


def _is_mask_of(mask: Any, ids: Any, negated: bool) -> bool:
    """Whether a mask says that ids are not negative."""
    if not isinstance(mask, Node) or not isinstance(ids, Node):
        return False
    if mask.target in (aten.bitwise_not.default, aten.logical_not.default):
        return _is_mask_of(mask.args[0], ids, not negated)
    forms = ((aten.lt.Scalar, 0), (aten.le.Scalar, -1)) if negated else ((aten.ge.Scalar, 0), (aten.gt.Scalar, -1))
    if not any(mask.target is target and mask.args[1] == number for target, number in forms):
        return False
    return isinstance(mask.args[0], Node) and ids_behind(mask.args[0]) is ids_behind(ids)
