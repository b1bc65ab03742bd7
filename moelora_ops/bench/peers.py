"""Other engines' expert layers, timed in the same loop where they can be imported; nothing here requires one.

Written from the signatures that vLLM and SGLang publish; an engine whose own signature differs is an error in the row, not the
end of the run.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from typing import Any, Callable

import torch

from .. import ops
from ..testing.cases import Inputs
from ..testing.timing import Calls
from . import calls

NAMES = ("vllm", "sglang")


@dataclass(frozen=True)
class Peer:
    """An engine and how to call its layer: a function of the batches of a cell."""

    name: str
    calls: Callable[[list[Inputs]], Calls]


def available(device: torch.device) -> list[Peer]:
    """The engines that are installed here and have kernels for the device."""
    found = [name for name in NAMES if device.type == "cuda" and importlib.util.find_spec(name) is not None]
    return [Peer(name, _CALLS[name]) for name in found]


def missing(peers: list[Peer]) -> str:
    """A line that says which engines are not compared."""
    names = [name for name in NAMES if name not in {peer.name for peer in peers}]
    return f"not compared, because not importable here: {', '.join(names)}" if names else ""


def _vllm(batches: list[Inputs]) -> Calls:
    """vLLM's fused_experts, and what its fused_moe_lora adds for both projections, the alignment given."""
    layer = importlib.import_module("vllm.model_executor.layers.fused_moe").fused_experts
    _refuse_special(batches[0])

    def base(batch: Inputs) -> Any:
        return layer(batch.hidden_states, batch.w13, batch.w2, batch.topk_weights, batch.topk_ids)

    deltas = [_VllmDelta(batch) for batch in batches]
    return {"vllm base": (base, batches), "vllm delta": (lambda delta: delta(), deltas)}


def _sglang(batches: list[Inputs]) -> Calls:
    """SGLang's fused_experts without adapters."""
    package = "sglang.srt.layers.moe"
    layer = importlib.import_module(f"{package}.fused_moe_triton.fused_moe").fused_experts
    config = importlib.import_module(f"{package}.moe_runner").MoeRunnerConfig(inplace=False)
    output = importlib.import_module(f"{package}.topk").StandardTopKOutput
    _refuse_special(batches[0])

    def base(batch: Inputs) -> Any:
        routing = output(batch.topk_weights, batch.topk_ids, None)
        return layer(batch.hidden_states, batch.w13, batch.w2, routing, moe_runner_config=config)

    return {"sglang base": (base, batches)}


_VLLM_TILES = dict(block_size_m=64, block_size_n=64, block_size_k=32, group_size_m=8, num_warps=4, num_stages=3, split_k=1)
_CALLS = {"vllm": _vllm, "sglang": _sglang}


class _VllmDelta:
    """Both calls of vLLM's fused_moe_lora of a layer, with its default tiles of 64 x 64 x 32."""

    def __init__(self, batch: Inputs) -> None:
        module = importlib.import_module("vllm.lora.ops.triton_ops.fused_moe_lora_op")
        self.function = module.fused_moe_lora
        wanted = inspect.signature(module._fused_moe_lora).parameters
        case, device = batch.case, batch.w13.device
        ours = calls.Delta(batch)
        args, options = batch.align(64)
        sorted_token_ids, expert_ids, post_padded = ops.moe_lora_align_block_size(*args, **options)
        slots = [*range(case.max_loras), -1]
        counted_by_tensor = "num_active_loras" in wanted and "Tensor" in str(wanted["num_active_loras"].annotation)
        common: dict[str, Any] = dict(
            topk_weights=batch.topk_weights,
            sorted_token_ids=sorted_token_ids,
            expert_ids=expert_ids,
            num_tokens_post_padded=post_padded,
            token_lora_mapping=batch.token_lora_mapping,
            max_lora_rank=case.max_lora_rank,
            top_k_num=case.top_k,
            lora_ids=torch.tensor(slots, dtype=torch.int32, device=device),
            num_active_loras=torch.tensor([case.max_loras]) if counted_by_tensor else case.max_loras,
            adapter_enabled=torch.ones(len(slots), dtype=torch.int32, device=device),
        )
        for stage in ("shrink", "expand"):
            common |= {f"{stage}_{name}": value for name, value in _VLLM_TILES.items()}
        a13, b13 = batch.gate_up_lora()
        a2, b2 = batch.down_lora()
        first = dict(output=ours.gate_up_out, qcurr_hidden_states=batch.hidden_states, lora_a_stacked=a13, lora_b_stacked=b13)
        second = dict(output=ours.down_out, qcurr_hidden_states=ours.act, lora_a_stacked=a2, lora_b_stacked=b2)
        second["mul_routed_weight"] = True  # its inputs are then one row per pair
        self.options = [{k: v for k, v in {**common, **part}.items() if k in wanted} for part in (first, second)]

    def __call__(self) -> None:
        for options in self.options:
            self.function(**options)


def _refuse_special(batch: Inputs) -> None:
    case = batch.case
    if case.activation != "silu" or not case.gated or case.bias or batch.expert_map is not None:
        raise NotImplementedError("the comparison covers plain gated SiLU layers")
