"""Inductor rewrites around the ops: `enable()` switches them on for what is compiled from then on.

    with moelora_ops.compile.enable() as rewrites:
        compiled = torch.compile(model, fullgraph=True)
        compiled(x)
    print(rewrites.fired)

| name | in the graph | instead |
|---|---|---|
| eager_lora | A and B gathered for each pair, two products, a sum | align and `fused_moe_lora` |
| shared_align | alignments of the same arguments | one |
| expert_layer | base, delta, activation, base, delta, weighted sum | `fused_experts_lora` |
| delta_activation | `fused_moe_lora` and the activation | one op, one pass over the rows |

docs/passes.md says what each recognises and what it leaves alone.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

NAMES = ("eager_lora", "shared_align", "expert_layer", "delta_activation")  # in the order in which they are applied
__all__ = ["NAMES", "Rewrites", "enable"]


class Rewrites:
    """The rewrites while they are switched on: `disable()`, or the end of a `with`, removes them.

    Attributes:
        fired: how often each has been applied. A graph that Inductor takes from its cache was rewritten when it was stored:
            nothing is counted then.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        from . import _inductor, delta_activation, eager_lora, expert_layer, shared_align

        modules = {m.__name__.rpartition(".")[2]: m for m in (eager_lora, shared_align, expert_layer, delta_activation)}
        self.fired = dict.fromkeys(names, 0)
        self._rewrites = [(name, modules[name].rewrite) for name in names]
        self._remove = _inductor.remove
        self._installed: Any = _inductor.install(self._apply, names)

    def _apply(self, graph: Any) -> None:
        for name, rewrite in self._rewrites:
            self.fired[name] += rewrite(graph)
        graph.lint()

    def disable(self) -> None:
        """Remove the rewrites: Inductor's configuration is as before. Once is enough, more does no harm."""
        if self._installed is not None:
            self._remove(self._installed)
            self._installed = None

    def __enter__(self) -> Rewrites:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.disable()


def enable(*names: str) -> Rewrites:
    """Switch rewrites on, all or those named, for every graph that Inductor compiles from now on in this process.

    A plain call stays on until `disable()` of what it returns; as a context manager, until the end of the block. A pass that
    is set in `torch._inductor.config.post_grad_custom_pre_pass` runs first and is put back afterwards. What was compiled
    before stays as it is: call this first, or `torch._dynamo.reset()` after it. Graphs in Inductor's caches are told apart by
    the files of the rewrites and the names that are on.

    Raises:
        ValueError: a name that is none of `NAMES`.
        UnsupportedError: this torch's private parts are not known; everything else works without the rewrites.
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(f"names must be among {', '.join(NAMES)}, got {', '.join(map(repr, unknown))}")
    return Rewrites(tuple(name for name in NAMES if not names or name in names))
