"""Names of tensors: which are for routed experts, of which layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..errors import AdapterError
from .geometry import MoeGeometry

# Only prefixes of the decoder layers: `mtp.layers.0` or the layers of a vision tower are others.
PREFIX = r"(?:(?:model|language_model|text_model|backbone|thinker|llm|transformer|decoder)\.)*"
_BEGIN = re.compile(rf"(?:base_model\.model\.)?(?P<path>{PREFIX}layers\.(?P<layer>[0-9]{{1,9}})\.)")
_MODULE = r"(?:(?:mlp|block_sparse_moe|feed_forward|ffn|mixer|moe)\.){0,2}"
# What torch.compile, FSDP, activation checkpointing and DDP put between the modules of a state dict.
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
# The name of the adapter is in the key where a state dict was saved without PEFT.
LORA = r"\.lora_(?P<half>[AB])(?:\.(?P<adapter>[A-Za-z0-9_-]+))?\.weight"
_ADAPTER = re.compile(r"\.lora_[AB](?:\.(?P<adapter>[A-Za-z0-9_-]+))?\.weight")
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
    """A pattern for what follows `layers.N.` in names of one format: groups `path` (of the module) and those of the arguments.

    Args:
        module: what follows the block's own name (`mlp`, `block_sparse_moe`, ... or nothing), such as `experts`.
        lora: what follows the path.
    """
    return re.compile(rf"(?P<path>{_MODULE}{module}){lora}")


def split(name: str) -> tuple[str, str]:
    """A name up to `layers.N.`, and the rest. The 37,000 names of an adapter have 48 beginnings and 768 rests."""
    cut = name.find(".", name.find("layers.") + 7) + 1
    return name[:cut], name[cut:]


def is_decoder(begin: str) -> bool:
    """Whether a name's beginning is that of a decoder layer."""
    return _begin(begin) is not None


def clean(name: str) -> str:
    """A name, or part of one, without the wrappers of training."""
    return _WRAPPERS.sub("", name)


def match(patterns: Iterable[re.Pattern[str]], rest: str) -> re.Match[str] | None:
    """The match of a name's rest with the first pattern that it has, wrappers of training left out."""
    rest = clean(rest)
    return next(filter(None, (p.fullmatch(rest) for p in patterns)), None)


def _begin(begin: str) -> re.Match[str] | None:
    return _BEGIN.fullmatch(clean(begin))


class Found(NamedTuple):
    """What a name says."""

    path: str  # of the module in the base model
    layer: int
    parts: Mapping[str, str | None]  # the other groups of the pattern


class Finder:
    """What the names of one adapter say, all of which have a beginning and a rest that match; each is looked at once."""

    def __init__(self, patterns: Iterable[re.Pattern[str]], geometry: MoeGeometry) -> None:
        self._patterns, self._geometry = tuple(patterns), geometry
        self._begins: dict[str, tuple[str, int]] = {}
        self._rests: dict[str, dict[str, str | None]] = {}

    def __call__(self, name: str) -> Found:
        """Raises: AdapterError for a layer that is none of the base's with routed experts."""
        begin, rest = split(name)
        if begin not in self._begins:
            self._begins[begin] = self._place(name, begin)
        if rest not in self._rests:
            found = match(self._patterns, rest)
            assert found is not None
            self._rests[rest] = found.groupdict()
        (path, layer), parts = self._begins[begin], self._rests[rest]
        return Found(f"{path}{parts['path']}", layer, parts)

    def _place(self, name: str, begin: str) -> tuple[str, int]:
        found = _begin(begin)
        assert found is not None
        layer, layers = int(found["layer"]), self._geometry.moe_layers
        if layer not in layers:
            raise AdapterError(f"{name}: layer must be one of the base's with routed experts, {_ranges(layers)}, got {layer}")
        return found["path"], layer


def is_for_experts(name: str) -> bool:
    """Whether a tensor may belong to routed experts: then it is understood or refused, never skipped."""
    if ".experts." in name:  # the rule below, without its cost for 37,000 names
        return True
    parts = re.split(r"[./]", name.lower())
    return any(("expert" in part and "share" not in part) or part in _EXPERT_MODULES for part in parts)


def check_one_adapter(names: list[str]) -> None:
    """Raises: AdapterError where keys carry the names of several adapters, or some a name and some none."""
    ends: dict[str, str] = {}
    for name in names:
        ends.setdefault(name[name.rfind(".lora_") :], name)
    seen: dict[str | None, str] = {}
    for end, name in ends.items():
        if found := _ADAPTER.fullmatch(end):
            seen.setdefault(found["adapter"], name)
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
