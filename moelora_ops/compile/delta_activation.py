"""Delta and activation in one pass: `fused_moe_lora` on gate and up, then silu(gate) * up and the like.

    fused_moe_lora(base, ...); act(base[..., :I]) * base[..., I:]    becomes    fused_moe_lora_activation(base, ...)

Fires where the delta fills the width of the base (two slices, or one without a gate), nothing else reads the sum or what is
computed on the way to the activation, and the result has the dtype of the base. Interleaved gate and up do not qualify.
"""

from __future__ import annotations

from typing import Any, Sequence

from torch.fx import Graph, Node

from ..ops.fused_moe_lora_activation import OP
from ._algebra import Abandoned, Applied, Axis, Factor, Leaf, NoMatch
from ._graph import behind, between, used_elsewhere
from ._inductor import DeltaCall, Emitter, contiguous, delta_calls, plain, quotient, replace, same, value
from ._reader import Reader

# What an activation is as a product of functions of the gate, and the number before it; up is one more factor.
_ACTIVATIONS = {
    "silu": (("sigmoid", "x"), 1.0),
    "gelu": (("erf", "x"), 0.5),
    "gelu_tanh": (("tanh", "x"), 0.5),
    "relu2": (("relu", "relu"), 1.0),
}


class Activation:
    """A product of factors read as the activation of a delta call's sum.

    Attributes: name, gated, scale (the number that belongs to it), pair_axes, column_axes.
    Raises: NoMatch where it is none.
    """

    def __init__(self, factors: Sequence[Factor], call: DeltaCall) -> None:
        width = plain(call.shape[2])
        kinds: dict[int, list[str]] = {}
        axes = set()
        for factor in factors:
            name, leaf = "x", factor
            if isinstance(factor, Applied):
                name, leaf = factor.name, factor.value.factors[0]
                if factor.value.scale != 1.0 or len(factor.value.factors) != 1:
                    raise NoMatch
            if type(leaf) is not Leaf or leaf.node is not call.result or leaf.negated:
                raise NoMatch
            pairs, columns, start = _columns(leaf, width)
            kinds.setdefault(start, []).append(name)
            axes.add((pairs, columns))
        if len(axes) != 1:
            raise NoMatch
        ((self.pair_axes, self.column_axes),) = axes
        length = _size(self.column_axes)
        self.gated = not same(length, width)
        if self.gated and (kinds.pop(length, None) != ["x"] or not same(2 * length, width)):
            raise NoMatch
        gate = tuple(sorted(kinds.pop(0, ())))
        names = [name for name, (form, _) in _ACTIVATIONS.items() if form == gate]
        if kinds or not names:
            raise NoMatch
        self.name, self.scale = names[0], _ACTIVATIONS[names[0]][1]


def _columns(leaf: Leaf, width: Any) -> tuple[tuple[Axis, ...], tuple[Axis, ...], int]:
    """Axes of the pairs, axes of a run of columns, first column."""
    refs = list(leaf.all_refs())
    inner: list[Axis] = []
    start, step, partial = 0, 1, False
    while refs and not same(step, width):
        ref = refs.pop()
        if quotient(width, step * ref.extent) is None or partial and not same(ref.axis.size, 1):
            raise NoMatch  # columns with gaps
        start += ref.start * step
        step *= ref.extent
        partial = partial or not ref.whole
        if not same(ref.axis.size, 1):
            inner.insert(0, ref.axis)
    if not same(step, width) or not all(ref.whole for ref in refs):
        raise NoMatch
    return tuple(ref.axis for ref in refs), tuple(inner), start


def _size(axes: Sequence[Axis]) -> Any:
    size: Any = 1
    for axis in axes:
        size = size * axis.size
    return size


def rewrite(graph: Graph) -> int:
    """Apply to a graph; returns how often it fired."""
    return sum(_rewrite_one(graph, call) for call in delta_calls(graph))


def _rewrite_one(graph: Graph, call: DeltaCall) -> bool:
    lora_b, top_k, width = call.arguments["lora_b_stacked"], plain(call.shape[1]), plain(call.shape[2])
    if len(lora_b) > 2 or not isinstance(top_k, int):
        return False
    if not same(len(lora_b) * plain(value(lora_b[0]).shape[2]), width):  # as wide as the base, so the offset is 0
        return False
    root, name = _activated(call, len(lora_b) == 2)
    if root is None:
        return False
    if used_elsewhere(between(call.result, root), root) or len(call.base.users) > 1 or not contiguous(value(root)):
        return False
    emit = Emitter(graph, root)
    base = emit.reshape(call.base, [-1, top_k, width])
    names = ("hidden_states", "lora_a_stacked", "lora_b_stacked", "topk_weights", "sorted_token_ids", "expert_ids")
    positional = [call.arguments[n] for n in (*names, "num_tokens_post_padded")]
    options = {n: call.arguments[n] for n in ("lora_ranks", "mul_routed_weight") if n in call.arguments}
    fused = emit(OP, base, *positional, **options, activation=name)
    replace(graph, root, emit.reshape(fused, value(root).shape))
    return True


def _activated(call: DeltaCall, gated: bool) -> tuple[Node | None, str]:
    """The first node that is the activation of the whole sum, and which."""
    for node in behind(call.result)[1:]:
        if node.op != "call_function" or getattr(node.meta.get("val"), "dtype", None) != value(call.base).dtype:
            continue
        try:
            found = Reader()(node)
            activation = Activation(found.factors, call)
        except (Abandoned, NoMatch):
            continue
        whole = found.axes() == (*activation.pair_axes, *activation.column_axes)
        if whole and activation.gated == gated and abs(found.scale - activation.scale) < 1e-6:
            return node, activation.name
    return None, ""
