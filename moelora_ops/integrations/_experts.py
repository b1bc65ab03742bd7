"""transformers' experts modules: which of them our op can serve, and the function that serves them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import reference
from ..adapters import MoeGeometry, PoolLayer
from ..checks import COMPUTE_DTYPES, short
from ..errors import UnsupportedError
from ..meta.fused_experts_lora import ACTIVATIONS
from ..ops import fused_experts_lora
from ._sequences import Sequences

NAME = "moelora"  # of the implementation in transformers' ExpertsInterface
_ATTRIBUTE = "_moelora"  # of an experts module: how it is served; neither parameter nor buffer nor module
_LAYER = re.compile(r"(?P<decoder>(?:.*\.)?)layers\.(?P<layer>[0-9]+)\.")
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")  # what transformers' decorator sets
_CLOSE = 1e-5  # of the activation's proof: some models compute it in fp32


@dataclass(frozen=True)
class Activation:
    """What lies between the two projections, in the op's words."""

    activation: str
    gated: bool
    interleaved: bool = False
    alpha: float = 1.702
    limit: float | None = None

    def __call__(self, gate_up: Tensor) -> Tensor:
        return reference.activate(
            gate_up, self.activation, gated=self.gated, interleaved=self.interleaved, alpha=self.alpha, limit=self.limit
        )


class Served:
    """How one experts module is served: its activation, its layer of the pool, the slots of the running batch."""

    def __init__(self, activation: Activation, layer: PoolLayer, sequences: Sequences) -> None:
        self.activation, self.layer, self.sequences = activation, layer, sequences

    def __deepcopy__(self, memo: dict[int, Any]) -> Served:
        return self  # a copy of the model has weights of its own and the same adapters

    def run(self, experts: nn.Module, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        how, lora = self.activation, self.layer
        first, down = first_name(experts), "down_proj"
        w13, w2 = natural(experts, first), natural(experts, down)
        if w13.stride(2) != 1 or w2.stride(2) != 1:
            raise UnsupportedError(
                f"{first} and {down} must be stored with contiguous inputs, as `enable` laid them out, got strides "
                f"{experts.get_parameter(first).stride()} and {experts.get_parameter(down).stride()}: call refresh()"
            )
        return fused_experts_lora(
            hidden_states, w13, w2, topk_weights.float(), topk_ids, self.sequences.rows(hidden_states.shape[0]).slots,
            lora.lora_a13, lora.lora_b13, lora.lora_a2, lora.lora_b2,
            lora_ranks=lora.lora_ranks, adapter_enabled=lora.adapter_enabled,
            w13_bias=getattr(experts, f"{first}_bias") if experts.has_bias else None,
            w2_bias=getattr(experts, f"{down}_bias") if experts.has_bias else None,
            activation=how.activation, gated=how.gated, interleaved=how.interleaved, swiglu_alpha=how.alpha,
            swiglu_limit=how.limit,
        )  # fmt: skip


def register() -> None:
    """Offer our implementation to transformers; once is enough, again is harmless."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def experts_forward(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        served: Served | None = getattr(experts, _ATTRIBUTE, None)
        if served is None:  # another model made from the same config object: transformers' own default
            own: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, hidden_states, top_k_index, top_k_weights)
            return own
        return served.run(experts, hidden_states, top_k_index, top_k_weights)

    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def serve(experts: nn.Module, served: Served | None) -> None:
    """Attach how a module is served; None: no longer."""
    if served is None:
        experts.__dict__.pop(_ATTRIBUTE, None)
    else:
        experts.__dict__[_ATTRIBUTE] = served


def is_chosen(experts: nn.Module) -> bool:
    """Whether the module runs through our implementation; `set_experts_implementation` can choose another at any time."""
    return getattr(experts.config, "_experts_implementation", None) == NAME


def is_served(experts: nn.Module) -> bool:
    return _ATTRIBUTE in experts.__dict__


def first_name(experts: nn.Module) -> str:
    """The parameter of the first projection."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def natural(experts: nn.Module, name: str) -> Tensor:
    """A weight as [E, out, in], a view."""
    weight: Tensor = getattr(experts, name)
    return weight.transpose(1, 2) if experts.is_transposed else weight


def place(modules: dict[int, nn.Module]) -> tuple[torch.dtype, torch.device]:
    """Where the experts' weights are. Not a tensor: whoever held a view of one while `lay_out` runs would keep its old copy."""
    weight = next(iter(modules.values())).get_parameter("down_proj")
    return weight.dtype, weight.device


def lay_out(experts: nn.Module, *, natural_order: bool) -> None:
    """Store weights so that their inputs (natural_order) or their last dimension are contiguous: shape and values stay.

    A model that stores [E, in, out] gets the op's layout without a second copy of its weights: each parameter moves once
    and is then a transposed view of its own storage. One parameter at a time exists twice.
    """
    for name in (first_name(experts), "down_proj"):
        weight = experts.get_parameter(name)
        wanted = natural(experts, name) if natural_order else weight.data
        if wanted.stride(-1) != 1:
            with torch.inference_mode(False):  # a parameter made inside it could not be trained or loaded outside
                moved = wanted.detach().contiguous()
                weight.data = moved.transpose(1, 2) if natural_order and experts.is_transposed else moved


def find(model: nn.Module) -> dict[int, nn.Module]:
    """The routed experts of a model by decoder layer.

    Raises: UnsupportedError naming the module and what is missing.
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, module in _candidates(model):
        where = f"{name} ({type(module).__name__})"
        if not all(hasattr(module, flag) for flag in _FLAGS):
            raise UnsupportedError(f"{where} must go through transformers' ExpertsInterface: it has a forward of its own")
        match = _LAYER.match(name)
        if match is None:
            raise UnsupportedError(f"{where} must be part of a decoder layer, `layers.N.` in its name")
        layer = int(match["layer"])
        if layer in found:
            raise UnsupportedError(
                f"layer {layer} must have one set of routed experts, got {found[layer][0]} and {name}: enable the sub-model "
                "that is meant"
            )
        check_served(where, module)
        found[layer] = (name, module)
    if not found:
        raise UnsupportedError(f"model must have routed experts, got a {type(model).__name__} without any")
    return {layer: module for layer, (_, module) in sorted(found.items())}


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are experts, or call themselves so."""
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Experts") or all(hasattr(module, flag) for flag in _FLAGS):
            yield name, module


def check_served(where: str, experts: nn.Module) -> None:
    """Raise UnsupportedError for a module that the op cannot serve."""
    if getattr(experts, "has_post_expert_norm", False):
        raise UnsupportedError(f"{where} must have no norm after its experts: the op has none")
    if getattr(experts, "_is_expert_parallel", False):
        raise UnsupportedError(f"{where} must hold all experts: expert parallelism is not supported here")
    names = [first_name(experts), "down_proj"]
    names += [f"{name}_bias" for name in names] if experts.has_bias else []
    for name in names:
        weight = getattr(experts, name, None)
        if not isinstance(weight, Tensor):
            raise UnsupportedError(f"{where} must have a parameter {name}, got {type(weight).__name__}")
        if type(weight) not in (nn.Parameter, Tensor):
            raise UnsupportedError(f"{where}.{name} must be a plain tensor, got {type(weight).__name__}: no tensor parallelism")
        if weight.dtype not in COMPUTE_DTYPES:
            raise UnsupportedError(
                f"{where}.{name} must be {short(COMPUTE_DTYPES)}, got {short([weight.dtype])}: dequantise the model"
            )
        if weight.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"{where}.{name} must be on a cpu or cuda device, got {weight.device}")


def geometry(model: nn.Module, modules: dict[int, nn.Module], activation: Activation) -> MoeGeometry:
    """Sizes and storage as the modules have them; a config may call them by any name.

    Raises: UnsupportedError where layers differ: one pool holds layers of one shape.
    """
    kinds: dict[tuple[Any, ...], int] = {}
    for layer, experts in modules.items():
        w13, w2 = natural(experts, first_name(experts)), natural(experts, "down_proj")
        kinds.setdefault((tuple(w2.shape), w13.shape[1], experts.is_transposed, w2.dtype, w2.device), layer)
    if len(kinds) > 1:
        raise UnsupportedError(f"experts of all layers must have one shape, storage, dtype and device, got {_spell(kinds)}")
    ((num_experts, hidden_size, intermediate_size), rows, *_), first = next(iter(kinds.items()))
    if rows != (2 if activation.gated else 1) * intermediate_size:
        raise UnsupportedError(f"layer {first} must have {rows} = {2 if activation.gated else 1} * {intermediate_size} rows")
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return MoeGeometry(
        num_layers=max(modules) + 1,
        moe_layers=tuple(modules),
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        gated=activation.gated,
        interleaved=activation.interleaved,
        transposed=bool(modules[first].is_transposed),
        model_type=getattr(config, "model_type", ""),
        top_k=getattr(config, "num_experts_per_tok", None),
    )


def _spell(kinds: dict[tuple[Any, ...], int]) -> str:
    return ", ".join(f"layer {layer}: [E, H, I] {shape}, {rest}" for (shape, *rest), layer in kinds.items())


def prove_activation(modules: dict[int, nn.Module]) -> Activation:
    """What the modules compute between their projections, found by trying it on numbers instead of trusting names.

    Raises: UnsupportedError where no activation of the op has their values.
    """
    proven: Activation | None = None
    experts: Any
    for layer, experts in modules.items():
        probe = _probe(natural(experts, "down_proj").device)
        values = experts._apply_gate(probe) if experts.has_gate else experts.act_fn(probe)
        if proven is None or not _same(proven(probe), values):
            matching = (candidate for candidate in _activations(experts) if _same(candidate(probe), values))
            found = next(matching, None)
            if found is None:
                raise UnsupportedError(
                    f"the activation of layer {layer}'s {type(experts).__name__} must be one of {', '.join(ACTIVATIONS)}, "
                    "plain or clamped as in gpt-oss: its values are those of none"
                )
            if proven is not None:
                raise UnsupportedError(f"all layers must have one activation, got {proven} and, from layer {layer}, {found}")
            proven = found
    assert proven is not None
    return proven


def _probe(device: torch.device) -> Tensor:
    """Gate and up values, asymmetric, and with tails that reach every clamp: [64, 2 * 8] fp64."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.3, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0, 300.0], dtype=torch.float64).repeat_interleave(8)
    return (torch.randn(64, 16, generator=generator, dtype=torch.float64) * scale[:, None]).to(device)


def _activations(experts: nn.Module) -> Iterator[Activation]:
    """What a module may compute, with the numbers that it has as attributes."""
    if not experts.has_gate:
        yield from (Activation(name, gated=False) for name in ACTIVATIONS if name != "swigluoai")
        return
    numbers = [float(v) for v in vars(experts).values() if type(v) in (int, float) and v > 0]
    for limit, name, interleaved in itertools.product([None, *numbers], ACTIVATIONS, (False, True)):
        for alpha in [1.702, *numbers] if name == "swigluoai" else [1.702]:
            yield Activation(name, True, interleaved, alpha, limit)


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left, right.to(left.dtype), rtol=_CLOSE, atol=_CLOSE)
