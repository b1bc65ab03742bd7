"""Alignments of the same arguments computed once: Inductor does not merge calls of an op that it does not know.

Fires for every `moe_lora_align_block_size` whose arguments equal those of an earlier one, also where they were computed twice
by the same small steps. Graphs here are functional, so that equal arguments stay equal. Two that are both returned stay two:
whoever wrote into one would write into the other.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from ._graph import structure
from ._inductor import aten, replace


def rewrite(graph: Graph) -> int:
    """Apply to a graph; returns how many alignments were left out."""
    first: dict[Any, Node] = {}
    fired = 0
    for node in list(graph.nodes):
        if node.target is not torch.ops.moelora.moe_lora_align_block_size.default:
            continue
        known = first.setdefault(structure((node.args, node.kwargs)), node)
        if known is not node and not (_is_returned(known) and _is_returned(node)):
            replace(graph, node, known)
            fired += 1
    return fired


def _is_returned(node: Node) -> bool:
    """Whether the graph returns a node, an item of it or a view."""
    return any(user.op == "output" or _is_view(user.target) and _is_returned(user) for user in node.users)


def _is_view(target: Any) -> bool:
    if target in (operator.getitem, aten._unsafe_view.default):
        return True
    return isinstance(target, torch._ops.OpOverload) and any(r.alias_info is not None for r in target._schema.returns)
