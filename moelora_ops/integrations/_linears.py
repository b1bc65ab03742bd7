"""LoRA on a model's linear layers (attention, dense and shared MLPs, head), in the slots of the experts' pool."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..adapters import files
from ..adapters.config import AdapterConfig
from ..adapters.loading import read_config
from ..adapters.names import LORA, PREFIX, clean
from ..checks import COMPUTE_DTYPES, short
from ..errors import AdapterError
from ..ops import fused_moe_lora
from ._sequences import Sequences, fixed

_TENSOR = re.compile(rf"(?:base_model\.model\.)?(?P<path>.+?)(?:{LORA}|\.lora_(?P<mlx>[ab]))")
# A place in the decoder, whatever the model around it; a vision tower's layers.0 is another place.
_PLACE = re.compile(rf"{PREFIX}(?P<place>layers\.[0-9]+\..+|lm_head)")


@dataclass(frozen=True)
class LinearLora:
    """One linear layer's change: scaling * b @ a."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scaling: float


class PooledLinear:
    """A and B of every slot for one `nn.Linear`, and the forward hook that adds each row's delta to its output."""

    def __init__(self, linear: nn.Linear, pool: LinearPool, dtype: torch.dtype, device: torch.device) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.users: set[int] = set()  # slots whose adapter has this layer
        self._linear, self._pool = linear, pool
        self._hook: RemovableHandle | None = None
        self.a, self.b = self.slots(dtype, device)

    def slots(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Empty ones: A and B."""
        dtype, loras, rank = self.dtype(dtype), self._pool.max_loras, self._pool.max_rank
        return (
            fixed(loras, 1, rank, self.in_features, dtype=dtype, device=device),  # a single expert
            fixed(loras, 1, self.out_features, rank, dtype=dtype, device=device),
        )

    def dtype(self, other: torch.dtype) -> torch.dtype:
        """That of the layer's weight, or `other` where it is none that the op computes in."""
        own = self._linear.weight.dtype
        return own if own in COMPUTE_DTYPES else other

    def attach(self) -> None:
        self._hook = self._linear.register_forward_hook(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PooledLinear:
        return self  # as `Served`: a copy of the model has the same adapters

    def __call__(self, linear: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        # Compiled and captured code must hold the delta, for whatever is loaded later. Eager code knows who is here.
        if not _is_recorded(output) and self.users.isdisjoint(self._pool.sequences.host):
            return None
        x = args[0].reshape(-1, self.in_features)
        rows = self._pool.sequences.rows(x.shape[0])
        y = output.view(-1, 1, self.out_features)
        weights, *aligned = rows.routing(self._pool.max_loras, self._pool.adapter_enabled)
        fused_moe_lora(y, x, [self.a], [self.b], weights, *aligned, lora_ranks=self._pool.lora_ranks)
        return output

    def detach(self) -> None:
        if self._hook is not None:
            self._hook.remove()


class LinearPool:
    """Slots of adapters for the linear layers of a model, beside the `LoraPool` of its experts.

    Args:
        linears: by name in the model. max_loras, max_rank: as in the pool of the experts.
        sequences: which row has which slot. dtype: of layers whose weight has none that the op computes in (quantised ones).

    The hooks are in the model from `attach` to `detach`.
    """

    def __init__(
        self,
        linears: Mapping[str, nn.Linear],
        sequences: Sequences,
        *,
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_loras, self.max_rank, self.sequences = max_loras, max_rank, sequences
        self.lora_ranks = fixed(max_loras, dtype=torch.int32, device=device)
        self.adapter_enabled = fixed(max_loras, dtype=torch.int32, device=device)
        self._linears = {name: PooledLinear(linear, self, dtype, device) for name, linear in linears.items()}
        self._by_place = _by_place(self._linears)

    def name_of(self, path: str) -> str | None:
        """The linear layer that an adapter's path means: the same name, or the same place in the same decoder layer."""
        match = _PLACE.fullmatch(path)
        if path in self._linears:
            return path
        return self._by_place.get(match["place"]) if match is not None else None

    def load(self, loras: Mapping[str, LinearLora], slot: int) -> None:
        """Replace a slot, in place. `read` has checked everything."""
        self.unload(slot)
        for name, lora in loras.items():
            linear, rank = self._linears[name], lora.a.shape[0]
            linear.a[slot, 0, :rank].copy_(lora.a)
            linear.b[slot, 0, :, :rank].copy_(lora.b.float() * lora.scaling)
            linear.users.add(slot)
        if loras:
            self.lora_ranks[slot].fill_(max(lora.a.shape[0] for lora in loras.values()))
            self.adapter_enabled[slot].fill_(1)

    def unload(self, slot: int) -> None:
        """Empty a slot."""
        self.adapter_enabled[slot].fill_(0)
        self.lora_ranks[slot].fill_(0)
        for linear in self._linears.values():
            if slot in linear.users:
                linear.a[slot].zero_()
                linear.b[slot].zero_()
                linear.users.discard(slot)

    def is_stale(self, dtype: torch.dtype) -> bool:
        """Whether a layer was cast, alone or with others."""
        return any(linear.a.dtype != linear.dtype(dtype) for linear in self._linears.values())

    def moved(self, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
        """Copy the slots to another device, or to the dtypes that the layers have now; the result puts them in place."""

        def copies(*pairs: tuple[Tensor, Tensor]) -> list[Tensor]:
            return [target.copy_(source) for target, source in pairs]

        made = {name: copies(*zip(x.slots(dtype, device), (x.a, x.b))) for name, x in self._linears.items()}
        numbers = (self.lora_ranks, self.adapter_enabled)
        numbers_made = copies(*((fixed(self.max_loras, dtype=torch.int32, device=device), x) for x in numbers))

        def put() -> None:
            for name, linear in self._linears.items():
                linear.a, linear.b = made[name]
            self.lora_ranks, self.adapter_enabled = numbers_made

        return put

    def attach(self) -> None:
        """Put the hooks into the model."""
        for linear in self._linears.values():
            linear.attach()

    def detach(self) -> None:
        """Take them out."""
        for linear in self._linears.values():
            linear.detach()

    def read(self, tensors: Mapping[str, Tensor], config: AdapterConfig) -> dict[str, LinearLora]:
        """Pairs of lora_A and lora_B, whose names `split` chose, by linear layer.

        Raises: AdapterError naming the tensor, what was expected and what came.
        """
        pairs: dict[str, dict[str, tuple[str, Tensor]]] = {}
        paths: dict[str, str] = {}
        for name, tensor in tensors.items():
            match = _TENSOR.fullmatch(clean(name))
            assert match is not None
            linear = self.name_of(match["path"])
            assert linear is not None
            half = match["half"] or match["mlx"].upper()
            if half in pairs.setdefault(linear, {}):
                raise AdapterError(f"{name}: {linear} must have one lora_A and one lora_B, got also {paths[linear]}")
            if match["mlx"] and config.factor is None:
                raise AdapterError(
                    f"adapter_config must have mlx-lm's lora_parameters.scale for {name}, got another tool's fields"
                )
            is_mlx = match["mlx"] is not None and tensor.dim() == 2  # (in, r) and (r, out) there
            pairs[linear][half], paths[linear] = (name, tensor.t() if is_mlx else tensor), match["path"]
        return {linear: self._checked(linear, paths[linear], pair, config) for linear, pair in pairs.items()}

    def _checked(self, name: str, path: str, pair: Mapping[str, tuple[str, Tensor]], config: AdapterConfig) -> LinearLora:
        if len(pair) < 2:
            raise AdapterError(f"{path} must have lora_A and lora_B, got only {next(iter(pair.values()))[0]}")
        linear, rank = self._linears[name], config.rank(path)
        for half, shape in (("A", (rank, linear.in_features)), ("B", (linear.out_features, rank))):
            tensor_name, tensor = pair[half]
            if tuple(tensor.shape) != shape:
                how = "rank of the config" if config.factor is None else "rank of the config, transposed by mlx-lm"
                raise AdapterError(f"{tensor_name} must have shape {shape} ({how}), got {tuple(tensor.shape)}")
        if rank > self.max_rank:
            raise AdapterError(f"{path}: rank must be <= max_rank = {self.max_rank}, got {rank}")
        lora = LinearLora(pair["A"][1], pair["B"][1], config.scaling(path))
        for what, values in (("lora_A", lora.a), ("scaling * lora_B", lora.b.float() * lora.scaling)):
            if not torch.isfinite(values.to(linear.a.dtype)).all():
                raise AdapterError(f"{path}: {what} must be finite in {short([linear.a.dtype])}, got infinite or NaN values")
        return lora

    def split(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """An adapter's tensors that are for our linear layers, and the others."""
        ours: list[str] = []
        others: list[str] = []
        for name in names:
            match = _TENSOR.fullmatch(clean(name))
            known = match is not None and self.name_of(match["path"]) is not None
            (ours if known else others).append(name)
        return ours, others


def read(path: str | os.PathLike[str], names: Iterable[str], pool: LinearPool) -> tuple[dict[str, LinearLora], list[str]]:
    """The linear layers' part of an adapter on disk, and the tensors among `names` that are for none of them.

    Raises: AdapterError naming the tensor or field, what was expected and what came.
    """
    ours, others = pool.split(names)
    if not ours:
        return {}, others
    weights = files.find(path)
    config = read_config(weights[0].parent, None)
    with files.TensorFiles(weights) as file:
        return pool.read({name: file.read(name) for name in ours}, config), others


def find(model: nn.Module, decoder: str, names: Sequence[str] | None) -> dict[str, nn.Linear]:
    """Linear layers of the decoder's layers, and the head, by name.

    Args:
        decoder: name of the module that has the layers. names: last parts of the names wanted ("q_proj"); None: all.

    Linear layers inside routed experts or of other towers (vision, audio) are left out: their rows are not those of sequences.
    So are classes with a forward of their own, such as routers that return choices (PhiMoE), but for quantised ones.
    """
    found = {}
    prefix = f"{decoder}.layers." if decoder else "layers."
    for name, module in model.named_modules():
        inside = name.startswith(prefix) and not any("expert" in p and "share" not in p for p in name.lower().split("."))
        if _is_plain(module) and (inside or name.rpartition(".")[2] == "lm_head"):
            if names is None or name.rpartition(".")[2] in names:
                found[name] = module
    return found


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    is_linear = isinstance(module, nn.Linear)
    return is_linear and (type(module).forward is nn.Linear.forward or module.weight.dtype not in COMPUTE_DTYPES)


def _is_recorded(tensor: Tensor) -> bool:
    """Whether what runs now is being compiled, or captured in a CUDA graph."""
    return torch.compiler.is_compiling() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _by_place(names: Iterable[str]) -> dict[str, str]:
    places: dict[str, list[str]] = {}
    for name in names:
        match = _PLACE.fullmatch(name)
        if match is not None:
            places.setdefault(match["place"], []).append(name)
    return {place: found[0] for place, found in places.items() if len(found) == 1}
