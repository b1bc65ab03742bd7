"""Many adapters at once on a Mixture-of-Experts model of transformers v5: `enable(model, ...)`.

The expert layers run through an implementation registered in transformers' ExpertsInterface, linear layers get a forward hook.
No code of the model changes, and neither do its parameters, buffers and submodules.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..adapters import LoraAdapter, LoraPool, loading
from ..checks import check_positive
from ..errors import AdapterError, UnsupportedError
from . import _experts, _linears
from ._sequences import Sequences


@dataclass(frozen=True)
class LoadReport:
    """What of an adapter was loaded where."""

    name: str
    slot: int
    rank: int  # of the experts' part, 0 without one
    expert_layers: tuple[int, ...]  # decoder layers whose experts have a delta
    linears: tuple[str, ...]  # linear layers with a delta, by name in the model
    not_applied: tuple[str, ...]  # tensors of the file that have no effect: routers, embeddings, what the model fuses


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

    Attributes:
        model: the model. pool: the slots of its experts. reports: what was loaded, by name.
    """

    def __init__(self, model: Any, max_loras: int, max_rank: int, linears: Sequence[str] | None, max_sequences: int) -> None:
        for name, size in (("max_loras", max_loras), ("max_rank", max_rank), ("max_sequences", max_sequences)):
            check_positive(name, size)
        if isinstance(linears, str):
            raise TypeError(f"linears must be a sequence of names, got the string {linears!r}")
        _check_model(model)
        self.model = model
        self.reports: dict[str, LoadReport] = {}
        self._max_sequences = max_sequences
        self._per_sequence = False  # a name for each sequence, or one for all
        self._modules = _experts.find(model)
        if any(map(_experts.is_served, self._modules.values())):
            raise ValueError("model must not be enabled already: close() the first one")
        self._activation = _experts.prove_activation(self._modules)
        self._geometry = _experts.geometry(model, self._modules, self._activation)
        decoder = _decoder_name(model, next(iter(self._modules.values())))
        self._linear_modules = _linears.find(model, decoder, linears)
        self._max_loras, self._max_rank = max_loras, max_rank
        self._make_pools()
        self._previous = self.model.get_experts_implementation()
        _experts.register()
        self.model.set_experts_implementation(_experts.NAME)
        self._hooks = _hook(model, model.get_submodule(decoder), self)

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
            strict: raise AdapterError instead of leaving tensors out.
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
        self.pool.load(adapter, slot)
        self._linear_pool.load(linears, slot)
        report = LoadReport(name, slot, adapter.rank, tuple(sorted(adapter.layers)), tuple(linears), tuple(not_applied))
        self.reports[name] = report
        if not_applied:
            warnings.warn(f"adapter {name!r}: not applied to this model: {_few(not_applied)}", stacklevel=2)
        return report

    def unload(self, name: str) -> None:
        """Empty an adapter's slot. It must not be one of the running `adapters`."""
        slot = self._slots_of([name])[0]
        if slot in self._sequences.host:
            raise ValueError(f"name must be of an adapter that is not in use, got {name!r} inside its `adapters` block")
        self.pool.unload(slot)
        self._linear_pool.unload(slot)
        del self.reports[name]

    @contextmanager
    def adapters(self, names: str | Sequence[str | None] | None) -> Iterator[None]:
        """Choose the adapters of the batches that run inside the block.

        Args:
            names: one per sequence of the batch, None for the base model; or a single one for all sequences. Beams, and the
                several sequences that `generate` returns for one, keep the adapter of theirs.
        """
        single = names is None or isinstance(names, str)
        chosen: Sequence[str | None] = [names] if names is None or isinstance(names, str) else list(names)
        if not 1 <= len(chosen) <= self._max_sequences:
            raise ValueError(f"names must be of 1 to max_sequences = {self._max_sequences} sequences, got {len(chosen)}")
        self.refresh()
        before, self._per_sequence = (self._sequences.host, self._per_sequence), not single
        self._sequences.set(self._slots_of(chosen))
        try:
            yield
        finally:
            host, self._per_sequence = before
            self._sequences.set(host)

    def refresh(self) -> None:
        """Follow a model that was moved, cast or given other weights: the pools go to its device and dtype, the weights get the
        layout that the op reads. `load` and `adapters` do this by themselves. What was compiled or captured before is void.
        """
        for layer, experts in self._modules.items():
            _experts.check_served(f"layer {layer} ({type(experts).__name__})", experts)
            _experts.lay_out(experts, natural_order=True)
        if self._is_stale():
            pool, linear_pool, sequences = self.pool, self._linear_pool, self._sequences
            linear_pool.remove()
            self._make_pools()
            _copy(pool, self.pool)
            self._linear_pool.copy_from(linear_pool)
            self._sequences.set(sequences.host)

    def close(self) -> None:
        """Take everything out of the model: it is as it was before `enable`."""
        for hook in self._hooks:
            hook.remove()
        self._linear_pool.remove()
        for experts in self._modules.values():
            _experts.serve(experts, None)
            _experts.lay_out(experts, natural_order=False)
        self.model.set_experts_implementation(self._previous)
        self.reports.clear()

    def _make_pools(self) -> None:
        geometry = _experts.geometry(self.model, self._modules, self._activation)
        dtype, device = _experts.place(self._modules)
        sizes: dict[str, Any] = {"max_loras": self._max_loras, "max_rank": self._max_rank, "dtype": dtype, "device": device}
        self.pool = LoraPool.from_config(geometry, **sizes)
        self._sequences = Sequences(self._max_sequences, device)
        self._linear_pool = _linears.LinearPool(self._linear_modules, self._sequences, **sizes)
        for layer, experts in self._modules.items():
            _experts.lay_out(experts, natural_order=True)
            _experts.serve(experts, _experts.Served(self._activation, self.pool.layer(layer), self._sequences))

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
            if name is not None and name not in self.reports:
                raise ValueError(f"names must be of loaded adapters ({', '.join(self.reports) or 'none'}), got {name!r}")
        return [-1 if name is None else self.reports[name].slot for name in names]

    def _check_batch(self, batch: int) -> None:
        """A batch must have the length of `names`; inside generate, where beams multiply it, a multiple."""
        count = len(self._sequences.host)
        if not self._per_sequence or batch == count or (batch % count == 0 and _inside_generate()):
            return
        raise ValueError(f"adapters(names) must have a name for each of the {batch} sequences of the batch, got {count}")


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
        if enabled._is_stale():
            enabled.refresh()
        shape = _batch_shape(args, kwargs)
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
        shape = _batch_shape(args, kwargs)
        if shape is not None:
            enabled._sequences.begin(shape[0] * shape[1])

    def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        enabled._sequences.end()

    hooks = [decoder.register_forward_pre_hook(begin, with_kwargs=True), decoder.register_forward_hook(end)]
    if model is not decoder:
        hooks.append(model.register_forward_pre_hook(check, with_kwargs=True))
    return hooks


def _batch_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """[B, S] of a forward's tokens."""
    for tokens in (kwargs.get("inputs_embeds"), kwargs.get("input_ids"), *args[:1]):
        if isinstance(tokens, Tensor) and tokens.dim() >= 2:
            return tokens.shape[0], tokens.shape[1]
    return None


def _inside_generate() -> bool:
    """Whether transformers' generate is among the callers."""
    from transformers import GenerationMixin

    code: CodeType = _unwrapped(GenerationMixin.generate).__code__
    frame = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _unwrapped(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


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
