"""Alignments of the same arguments computed once: Inductor does not merge calls of an op that it does not know.

Fires for every `moe_lora_align_block_size` whose arguments equal those of an earlier one, also where they were computed twice
by the same small steps. Graphs here are functional, so that equal arguments stay equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ._graph import structure
from ._inductor import replace


def rewrite(graph: Graph) -> int:
    """Apply to a graph; returns how many alignments were left out."""
    first: dict[Any, Node] = {}
    fired = 0
    for node in list(graph.nodes):
        if node.target is not torch.ops.moelora.moe_lora_align_block_size.default:
            continue
        known = first.setdefault(structure((node.args, node.kwargs)), node)
        if known is not node:
            replace(graph, node, known)
            fired += 1
    return fired
