"""The one `torch.library.Library` of the package, and how an op enters it.

`register` gives an op its schema, fake, CPU and CUDA kernels. `refuse_backward` adds an autograd kernel whose only job is to
make a backward pass raise: PyTorch's default for an op without a formula is a warning and a missing gradient.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import UnsupportedError

LIBRARY = torch.library.Library("moelora", "FRAGMENT")
# Exact strides: an expanded A or B reaches the kernel as it is, and Inductor has no stride order to compare. Comparing the
# alignment's symbolic one puts a guard on min(P * bs, ...) into its cache, which costs a third compile when read back.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def register(
    schema: str, *, check: Callable[..., None], fake: Callable[..., Any], cpu: Callable[..., Any], cuda: Callable[..., Any]
) -> Any:
    """Define the op of `schema` with its kernels; returns the overload to call.

    `cpu` serves where `_C_cpu` does not: that registers its kernels itself, which then need no Python between. Every other
    backend (sparse, MKL-DNN, other accelerators) gets the error of `check`, or that there is no kernel.

    Kernels get the arguments as the schema orders them: keyword-only ones by name, those equal to their default left out.
    """
    name = schema.partition("(")[0]
    try:
        LIBRARY.define(schema, tags=TAGS)
    except RuntimeError as error:
        raise ImportError(f"moelora::{name} is defined already: _C_schemas is for processes without moelora_ops") from error
    torch.library.register_fake(f"moelora::{name}", fake, lib=LIBRARY)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"moelora::{name}", "CPU"):
        LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")

    def unserved(*args: Any, **kwargs: Any) -> None:
        check(*args, **kwargs)
        raise UnsupportedError(f"moelora::{name} has kernels for cpu and cuda tensors, got {args[0].device.type}")

    LIBRARY.impl(name, unserved, "CompositeExplicitAutograd")
    return getattr(torch.ops.moelora, name).default


def refuse_backward(op: Any, *, check: Callable[..., None], cpu: Callable[..., Any], cuda: Callable[..., Any]) -> None:
    """Make the float results of `op` (its return, or the first argument it writes) raise when backward reaches them.

    A written argument is one for autograd too: what it may not change is refused before it is written, and whoever saved it
    for a backward pass gets an error instead of a wrong gradient (not of a write in inference mode: no kernel runs there).

    Where nothing stands between autograd and the kernel `cpu` or `cuda`, it is called without going through the dispatcher
    again, which would take apart and put together all arguments twice: half of what an eager call costs.
    """
    name = op._schema.name.partition("::")[2]
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
    pure: Any = _RefusePure
    in_place: Any = _RefuseInPlace
    kernels = {("CPU", "AutogradCPU"): cpu, ("CUDA", "AutogradCUDA"): cuda}
    next_of = {_keys(*names).raw_repr(): kernel for names, kernel in kernels.items()}

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0 and _has_tangent((*args, *kwargs.values())):
            raise NotImplementedError(f"moelora::{name} has no forward derivative: it serves inference only")
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs):
            edge = _first_requiring_grad((*args, *kwargs.values()))
            if not writes:
                return pure.apply(args[0], edge, name, op, args, kwargs)
            check(*args, **kwargs)
            in_place.apply(args[0], edge, name)
            with below_autograd():
                return op(*args, **kwargs)
        known = next_of.get(keys.raw_repr())
        if known is not None:  # autograd has nothing to record below: no tensor asks for it
            result = known(*args, **kwargs)
        else:
            with below_autograd():
                result = op(*args, **kwargs)
        if writes:
            increment_version(args[0])
        return result

    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


below_autograd = torch._C._AutoDispatchBelowAutograd
increment_version = torch.autograd.graph.increment_version


def autograd_has_work(args: Iterable[Any], options: dict[str, Any]) -> bool:
    """Whether a call needs the kernel of `refuse_backward`, or has no need of `below_autograd` to pass it.

    The public functions go past that kernel where it has nothing to refuse: handing all arguments to Python and taking them
    back costs as much as the rest of a call. Modes and tracers see the op either way.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():  # Dynamo cannot trace the second question
        return True
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **options)


def _keys(*names: str) -> Any:
    """The set of these dispatch keys: that of a call on plain tensors outside all modes and transforms."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    return keys if len(names) == 1 else keys | _keys(*names[1:])


# A real op, so that compiling a forward whose inputs require grad works and only running its backward raises.
LIBRARY.define("no_backward(Tensor grad, SymInt[] size, str op) -> Tensor", tags=TAGS)


def _no_backward(grad: Tensor, size: list[int], op: str) -> Tensor:
    raise NotImplementedError(f"moelora::{op} has no backward: it serves inference only (call it under torch.no_grad())")


LIBRARY.impl("no_backward", _no_backward, "CompositeExplicitAutograd")
torch.library.register_fake("moelora::no_backward", lambda grad, size, op: grad.new_empty(size), lib=LIBRARY)


def _first_requiring_grad(args: Iterable[Any]) -> Tensor | None:
    for arg in args:
        if isinstance(arg, Tensor):
            if arg.requires_grad:
                return arg
        elif isinstance(arg, (list, tuple)):
            found = _first_requiring_grad(arg)
            if found is not None:
                return found
    return None


def _has_tangent(args: Iterable[Any]) -> bool:
    """Whether forward-mode AD follows any argument: without an error its result would be a tangent of zeros."""
    for arg in args:
        if isinstance(arg, (list, tuple)) and _has_tangent(arg):
            return True
        if isinstance(arg, Tensor) and forward_ad.unpack_dual(arg).tangent is not None:
            return True
    return False


class _RefusePure(torch.autograd.Function):
    """One edge, to the first input that requires grad, is enough for backward to reach the error."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, edge: Tensor, name: str, op: Any, args: Any, kwargs: Any) -> Any:
        ctx.name, ctx.size = name, edge.shape
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, torch.ops.moelora.no_backward(grad, ctx.size, ctx.name), None, None, None, None


class _RefuseInPlace(torch.autograd.Function):
    """The argument to be written becomes the result, so whoever differentiates through it reaches the error.

    It is written afterwards: torch looks only behind `forward` at whether it may be; a leaf or one of several views may not.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, edge: Tensor, name: str) -> Tensor:
        ctx.name, ctx.size = name, edge.shape
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, torch.ops.moelora.no_backward(grad, ctx.size, ctx.name), None
