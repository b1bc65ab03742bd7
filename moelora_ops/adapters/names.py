"""Names of tensors: which are for routed experts, of which layer."""

from __future__ import annotations

import re

from ..errors import AdapterError
from .geometry import MoeGeometry

# Only prefixes of the decoder layers: `mtp.layers.0` or the layers of a vision tower are others.
_PREFIX = r"(?:(?:model|language_model|text_model|backbone|thinker|llm|transformer|decoder)\.)*"
_MODULE = r"(?:(?:mlp|block_sparse_moe|feed_forward|ffn|mixer|moe)\.){0,2}"
# What torch.compile, FSDP, activation checkpointing and DDP put between the modules of a state dict.
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
# The name of the adapter is in the key where a state dict was saved without PEFT.
LORA = r"\.lora_(?P<half>[AB])(?:\.(?P<adapter>[A-Za-z0-9_-]+))?\.weight"
_ADAPTER = re.compile(r".*\.lora_[AB](?:\.(?P<adapter>[A-Za-z0-9_-]+))?\.weight")
# Modules under which some tools keep routed experts without calling them so.
_EXPERT_MODULES = ("switch_mlp", "input_linear", "output_linear", "moe_h_to_4h", "moe_4h_to_h", "moe_gate")
OTHER_BASE = ": is it for another base, or do r and rank_pattern not belong to it?"
_HINTS = {
    "lora_magnitude": "DoRA is no plain LoRA; merge it into the base, or train without use_dora",
    "lora_B.bias": "a bias on lora_B is not supported; train with lora_bias=false",
    "lora_bias": "a bias on lora_B is not supported; train with lora_bias=false",
    "modules_to_save": "full weights of experts are no LoRA; train them with target_modules or target_parameters",
    "lora_": "no format that is known has this name; see docs/adapters.md",
}


def pattern(module: str, lora: str = LORA) -> re.Pattern[str]:
    """A pattern for names of one format: groups `path` (of the module in the base model), `layer`, and those of the arguments.

    Args:
        module: what follows the block's own name (`mlp`, `block_sparse_moe`, ... or nothing), such as `experts`.
        lora: what follows the path.
    """
    layer = rf"(?P<path>{_PREFIX}layers\.(?P<layer>[0-9]{{1,9}})\.{_MODULE}{module})"
    return re.compile(rf"(?:base_model\.model\.)?{layer}{lora}")


def clean(name: str) -> str:
    """A name without the wrappers of training."""
    return _WRAPPERS.sub("", name)


def is_for_experts(name: str) -> bool:
    """Whether a tensor may belong to routed experts: then it is understood or refused, never skipped."""
    if ".experts." in name:  # the rule below, without its cost for 37,000 names
        return True
    parts = re.split(r"[./]", name.lower())
    return any(("expert" in part and "share" not in part) or part in _EXPERT_MODULES for part in parts)


def layer_of(match: re.Match[str], geometry: MoeGeometry) -> int:
    """The layer of a matched name, which must be one with routed experts."""
    layer = int(match["layer"])
    if layer not in geometry.moe_layers:
        raise AdapterError(
            f"{match.string}: layer must be one of the base's with routed experts, {_ranges(geometry.moe_layers)}, got {layer}"
        )
    return layer


def check_one_adapter(names: list[str]) -> None:
    """Raises: AdapterError where keys carry the names of several adapters, or some a name and some none."""
    seen: dict[str | None, str] = {}
    for name in names:
        if match := _ADAPTER.fullmatch(name):
            seen.setdefault(match["adapter"], name)
    if len(seen) > 1:
        raise AdapterError(f"tensors must be of one adapter, got {' and '.join(list(seen.values())[:2])}: save each by itself")


def unknown(name: str) -> AdapterError:
    """The refusal of a tensor for experts in no format that we know, with what is known about it."""
    hint = next((text for part, text in _HINTS.items() if part in name), "full weights are no LoRA (modules_to_save?)")
    return AdapterError(f"{name} must be a LoRA tensor of routed experts in a known format, got an unknown name: {hint}")


def check_shape(name: str, shape: tuple[int, ...], *sizes: tuple[str, int]) -> None:
    """A shape against named sizes, those of the base and the rank of the config."""
    if shape != tuple(size for _, size in sizes):
        want = ", ".join(f"{letter} = {size}" for letter, size in sizes)
        raise AdapterError(f"{name} must have shape [{want}], got {shape}{OTHER_BASE}")


def _ranges(layers: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) for a few, 0-2, 5 for many."""
    if len(layers) < 8:
        return str(layers)
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in zip(starts, ends))
