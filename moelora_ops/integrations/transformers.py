"""Many adapters at once on a Mixture-of-Experts model of transformers v5: `enable(model, ...)`.

The expert layers run through an implementation registered in transformers' ExpertsInterface, linear layers get a forward hook.
No code of the model changes, and neither do its parameters, buffers and submodules.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..adapters import LoraAdapter, LoraPool, loading
from ..checks import check_positive
from ..errors import AdapterError, UnsupportedError
from . import _experts, _linears
from ._sequences import Sequences, batch_shape, prompts_of_generate


_NOTHING = "every B, A or scaling in it is zero, or it has none for this model"


@dataclass(frozen=True)
class LoadReport:
    """What of an adapter was loaded where."""

    name: str
    slot: int
    rank: int  # of the experts' part, 0 without one
    expert_layers: tuple[int, ...]  # decoder layers whose experts have a delta
    linears: tuple[str, ...]  # linear layers with a delta, by name in the model
    not_applied: tuple[str, ...]  # tensors of the file that have no effect: routers, embeddings, what the model fuses
    is_zero: bool = False  # whether nothing changes at all: every A, B or scaling is zero, or there is none


@dataclass(frozen=True)
class _Block:
    """An open `adapters` block."""

    slots: tuple[int, ...] = (-1,)
    per_sequence: bool = False  # a name for each sequence, or one for all
    thread: int = 0


def enable(
    model: nn.Module,
    *,
    max_loras: int,
    max_rank: int,
    linears: Sequence[str] | None = None,
    max_sequences: int = 1024,
) -> EnabledModel:
    """Give a transformers MoE model slots for adapters, chosen per sequence of a batch.

    Args:
        model: a `PreTrainedModel`, weights in place (fp32, bf16 or fp16, on one device).
        max_loras: adapters that can be loaded at a time. max_rank: of any of their layers.
        linears: last parts of the names of the `nn.Linear` layers that adapters may change, such as ("q_proj", "v_proj");
            None: all of the decoder's and the head. Each costs memory for its slots, and in compiled code time as well, loaded
            or not; () leaves all of them to the base model.
        max_sequences: largest batch of `adapters`, beams not counted.

    Returns: what loads adapters and chooses them. Until then every row is the base model's.
    Raises: UnsupportedError for a model that cannot be served, naming the module and what is missing; ValueError, TypeError
        naming the argument.
    """
    return EnabledModel(model, max_loras, max_rank, linears, max_sequences)


class EnabledModel:
    """Adapters of a model; made by `enable`. One batch at a time: the choice of adapters is the model's, not a thread's.

    A deep copy is the same object, as a deep copy of the model has the same adapters.

    Attributes:
        model: the model. pool: the slots of its experts. reports: what was loaded, by name.
    """

    def __init__(self, model: Any, max_loras: int, max_rank: int, linears: Sequence[str] | None, max_sequences: int) -> None:
        for name, size in (("max_loras", max_loras), ("max_rank", max_rank), ("max_sequences", max_sequences)):
            check_positive(name, size)
        if isinstance(linears, str):
            raise TypeError(f"linears must be a sequence of names, got the string {linears!r}")
        model = getattr(model, "_orig_mod", model)  # of torch.compile: names and hooks are those of the model inside
        _check_model(model)
        self.model = model
        self.reports: dict[str, LoadReport] = {}
        self._blocks = [_Block()]  # the last one counts; the first is "outside"
        self._lock = threading.Lock()
        self._is_closed = False
        self._modules = _experts.find(model)
        if any(map(_experts.is_served, self._modules.values())):
            raise ValueError(
                "model must not be enabled already, nor be a copy of one that was: close() the first one, copy before"
            )
        self._activation = _experts.prove_activation(self._modules)
        self._geometry = _experts.geometry(model, self._modules, self._activation)
        decoder = _decoder_name(model, next(iter(self._modules.values())))
        self._linear_modules = _linears.find(model, decoder, linears)
        self._max_loras, self._max_rank = max_loras, max_rank
        self.pool, dtype, device = self._make_pool()
        self._sequences = Sequences(max_sequences, device)
        sizes: dict[str, Any] = {"max_loras": max_loras, "max_rank": max_rank}
        self._linear_pool = _linears.LinearPool(self._linear_modules, self._sequences, **sizes, dtype=dtype, device=device)
        self._served = {
            layer: _experts.Served(self._activation, self.pool.layer(layer), self._sequences) for layer in self._modules
        }
        for layer, experts in self._modules.items():
            _experts.lay_out(experts, natural_order=True)
            _experts.serve(experts, self._served[layer])
        self._linear_pool.attach()
        self._previous = self.model.get_experts_implementation()
        _experts.register()
        self.model.set_experts_implementation(_experts.NAME)
        self._hooks = _hook(model, model.get_submodule(decoder), self)

    def __deepcopy__(self, memo: dict[int, Any]) -> EnabledModel:
        return self

    def load(
        self, path: str | os.PathLike[str] | LoraAdapter, name: str, *, strict: bool = False, **options: Any
    ) -> LoadReport:
        """Read an adapter and put it into a free slot, or into its own when the name is loaded already.

        Everything is checked before anything is written: a load that raises leaves the slots as they were. Compiled code and
        captured graphs see the adapter at their next run. Tensors of the file that have no effect on this model are in the
        report, and a warning names them.

        Args:
            path: as in `load_adapter`; or a `LoraAdapter` made elsewhere, of which only the experts are taken.
            name: what to call it in `adapters`.
            strict: raise AdapterError instead of leaving tensors out, or loading an adapter that changes nothing.
            options: of `load_adapter`, such as b_packing.

        Raises: AdapterError as `load_adapter`, and where no slot is free; ValueError for a bad name.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"name must be a string that is not empty, got {name!r}")
        self.refresh()
        slot = self._slot_for(name)
        linears: dict[str, _linears.LinearLora] = {}
        if isinstance(path, LoraAdapter):
            adapter, not_applied = path, list(path.unused)
        else:
            adapter, _ = loading.load(path, self._geometry, max_rank=self._max_rank, **options)
            linears, not_applied = _linears.read(path, adapter.unused, self._linear_pool)
        if strict and not_applied:
            raise AdapterError(f"{name}: strict=True takes tensors that have an effect only, got {_few(not_applied)}")
        loras: tuple[Any, ...] = (*(lora for layer in adapter.layers.values() for lora in layer.values()), *linears.values())
        is_zero = not any(all(torch.as_tensor(part).any() for part in (x.a, x.b, x.scaling)) for x in loras)
        if strict and is_zero:
            raise AdapterError(f"{name}: strict=True takes adapters that have an effect only, got {_NOTHING}")
        is_new = False
        try:
            self.pool.load(adapter, slot)
            is_new = True
            self._linear_pool.load(linears, slot)
        except BaseException:
            if is_new or self.pool._ranks[slot] is None:  # interrupted while it was written: no half adapter stays
                self._empty(slot)
                self.reports.pop(name, None)
            raise
        layers = tuple(sorted(adapter.layers))
        report = LoadReport(name, slot, adapter.rank, layers, tuple(linears), tuple(not_applied), is_zero)
        self.reports[name] = report
        if is_zero:
            warnings.warn(f"adapter {name!r} changes nothing: {_NOTHING}", stacklevel=2)
        if not_applied:
            warnings.warn(f"adapter {name!r}: not applied to this model: {_few(not_applied)}", stacklevel=2)
        return report

    def unload(self, name: str) -> None:
        """Empty an adapter's slot. It must not be one of the running `adapters`."""
        self._check_open()
        if name is None:
            raise ValueError("name must be of a loaded adapter, got None")
        slot = self._slots_of([name])[0]
        if any(slot in block.slots for block in self._blocks):
            raise ValueError(f"name must be of an adapter that is not in use, got {name!r} inside its `adapters` block")
        self._empty(slot)
        del self.reports[name]

    @contextmanager
    def adapters(self, names: str | Sequence[str | None] | None) -> Iterator[None]:
        """Choose the adapters of the batches that run inside the block.

        Args:
            names: one per sequence of the batch, None for the base model; or a single one for all sequences. Beams, and the
                several sequences that `generate` returns for one, keep the adapter of theirs.

        Raises: ValueError for names that are not loaded, or too many; RuntimeError while another thread is inside a block.
        """
        single = names is None or isinstance(names, str)
        if not single and not isinstance(names, Iterable):
            raise TypeError(f"names must be a name, None, or one of these per sequence, got {type(names).__name__}")
        chosen: Sequence[str | None] = [names] if names is None or isinstance(names, str) else list(names)
        most = self._sequences.max_sequences
        if not 1 <= len(chosen) <= most:
            raise ValueError(f"names must be of 1 to max_sequences = {most} sequences, got {len(chosen)}")
        self.refresh()
        block = _Block(tuple(self._slots_of(chosen)), not single, threading.get_ident())
        with self._lock:
            if len(self._blocks) > 1 and self._blocks[-1].thread != block.thread:
                raise RuntimeError("adapters must not be chosen by two threads at a time: the choice is the whole model's")
            self._blocks.append(block)
        try:
            self._sequences.set(block.slots)
            self._check_chosen()
            yield
        finally:  # blocks inside generators may end in another order than they nest
            with self._lock:
                self._blocks = [other for other in self._blocks if other is not block]
            self._sequences.set(self._blocks[-1].slots)

    def refresh(self) -> None:
        """Follow a model that was moved, cast or given other weights: the pools go to its device and dtype, the weights get the
        layout that the op reads. `load` and `adapters` do this by themselves. What was compiled or captured before is void.
        """
        self._check_open()
        for layer, experts in self._modules.items():
            _experts.check_served(f"layer {layer} ({type(experts).__name__})", experts)
            _experts.lay_out(experts, natural_order=True)
        if self._is_stale() or self._linear_pool.is_stale(self.pool.dtype):
            pool, dtype, device = self._make_pool()
            _copy(self.pool, pool)
            put = self._linear_pool.moved(dtype, device)
            self._sequences.move(device)  # all that can run out of memory is done
            put()
            self.pool = pool
            for layer, served in self._served.items():
                served.layer = pool.layer(layer)

    def close(self) -> None:
        """Take everything out of the model: it is as it was before `enable`. Nothing can be loaded or chosen any more."""
        if self._is_closed:
            return
        self._is_closed = True
        for hook in self._hooks:
            hook.remove()
        self._linear_pool.detach()
        for experts in self._modules.values():
            _experts.serve(experts, None)
            _experts.lay_out(experts, natural_order=False)
        self.model.set_experts_implementation(self._previous)
        self.reports.clear()

    def _make_pool(self) -> tuple[LoraPool, torch.dtype, torch.device]:
        """An empty pool where the experts' weights are now, their dtype and device."""
        geometry = _experts.geometry(self.model, self._modules, self._activation)
        dtype, device = _experts.place(self._modules)
        sizes: dict[str, Any] = {"max_loras": self._max_loras, "max_rank": self._max_rank}
        return LoraPool.from_config(geometry, **sizes, dtype=dtype, device=device), dtype, device

    def _empty(self, slot: int) -> None:
        self.pool.unload(slot)
        self._linear_pool.unload(slot)

    def _is_stale(self) -> bool:
        return _experts.place(self._modules) != (self.pool.dtype, self._sequences.slots.device)

    def _slot_for(self, name: str) -> int:
        if name in self.reports:
            return self.reports[name].slot
        free = set(range(self._max_loras)) - {report.slot for report in self.reports.values()}
        if not free:
            loaded = ", ".join(self.reports)
            raise AdapterError(f"{name}: a slot must be free, got all {self._max_loras} (max_loras) taken by {loaded}")
        return min(free)

    def _slots_of(self, names: Sequence[str | None]) -> list[int]:
        for name in names:
            if name is not None and not (isinstance(name, str) and name in self.reports):
                raise ValueError(f"names must be of loaded adapters ({', '.join(self.reports) or 'none'}), got {name!r}")
        return [-1 if name is None else self.reports[name].slot for name in names]

    def _check_batch(self, batch: int) -> None:
        """A batch must have the length of `names`; inside generate, where beams multiply it, its prompts must."""
        block = self._blocks[-1]
        count = len(block.slots)
        if block.per_sequence and batch != count:
            prompts = prompts_of_generate()
            if batch % count or prompts != count:
                raise ValueError(
                    f"adapters(names) must have a name for each of the {prompts or batch} sequences of the batch, got {count}"
                )
        self._check_chosen()

    def _check_chosen(self) -> None:
        """An adapter must not be left out because somebody set another implementation of the experts."""
        if max(self._sequences.host) >= 0 and not all(map(_experts.is_chosen, self._modules.values())):
            raise ValueError(
                f"the model's experts implementation must be {_experts.NAME!r} for adapters to have an effect, got "
                f"{self.model.get_experts_implementation()}: model.set_experts_implementation({_experts.NAME!r})"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("the model must be enabled, got one that was closed: enable(model, ...) makes another")


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module) or not hasattr(model, "set_experts_implementation"):
        raise TypeError(f"model must be a PreTrainedModel of transformers v5, got {type(model).__name__}")
    wrapped = [name or "model" for name, module in model.named_modules() if type(module).__module__.startswith("peft.")]
    if wrapped or hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        found = f", got {_few(wrapped)}" if wrapped else ""
        raise UnsupportedError(f"model must be without PEFT adapters{found}: unload or merge them, and load their files here")


def _decoder_name(model: nn.Module, experts: nn.Module) -> str:
    """The module whose `layers` have the experts."""
    name: str = next(name for name, module in model.named_modules() if module is experts)
    return name[: name.index("layers.")].rstrip(".")


def _hook(model: nn.Module, decoder: nn.Module, enabled: EnabledModel) -> list[RemovableHandle]:
    """Work out each row's slot once a forward, before the decoder's layers, and check the batch where it can be checked.

    The check is Python's; traced code has none. The hook on the whole model also runs in front of `torch.compile(model)`.
    """

    def check_now(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if enabled._is_stale() and not enabled._is_closed:
            enabled.refresh()
        shape = batch_shape(args, kwargs)
        if shape is not None:
            enabled._check_batch(shape[0])

    untraced: Any = torch.compiler.disable(check_now)

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            untraced(args, kwargs)

    # torch.compile(model) calls it from outside the compiled code. Dynamo must not make compiled code of it, which would be
    # empty. Private to torch; where it is missing such calls are not checked.
    skip_code = getattr(torch._dynamo.eval_frame, "skip_code", None)
    if skip_code is not None:
        skip_code(check.__code__)

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check(module, args, kwargs)
        shape = batch_shape(args, kwargs)
        if shape is not None:
            enabled._sequences.begin(shape[0] * shape[1])

    def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        enabled._sequences.end()

    hooks = [decoder.register_forward_pre_hook(begin, with_kwargs=True), decoder.register_forward_hook(end)]
    if model is not decoder:
        hooks.append(model.register_forward_pre_hook(check, with_kwargs=True))
    return hooks


def _copy(source: LoraPool, target: LoraPool) -> None:
    """The slots of a pool into one of another device or dtype."""
    for layer in source.layer_ids:
        for field in fields(source.layer(layer)):
            values = getattr(source.layer(layer), field.name)
            if isinstance(values, Tensor):
                getattr(target.layer(layer), field.name).copy_(values)
    target._ranks, target._enabled = list(source._ranks), list(source._enabled)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
