"""A CUDA-graph capture without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FakeGraph(TorchDispatchMode):
    """Record each dispatched op with its tensors, and run the same calls on them again: what a CUDA graph does, without one.

    Ops that read device data on the host, or whose output sizes depend on it, are refused. It sees dispatched ops only: not
    what happens inside one, nor the rules for streams and allocation.
    """

    HOST_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::item"}
    NOT_CAPTURABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe}

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in self.HOST_READS or self.NOT_CAPTURABLE & set(func.tags):
            raise RuntimeError(f"{func} cannot be captured")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, captured in self.calls:
            for old, new in zip(tree_leaves(captured), tree_leaves(func(*args, **kwargs))):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
