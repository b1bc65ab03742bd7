"""The demo's model: a small decoder with attention over a static KV cache and experts in every layer, all weights random.

One step takes one token of every sequence. Nothing in it depends on values on the host, so it compiles with fullgraph=True and
can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A transformers config: what `load_adapter` and `LoraPool.from_config` are given.
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}

# experts(hidden_states [T, H], topk_weights [T, K], topk_ids [T, K], token_lora_mapping [T]) -> [T, H]
Experts = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
MakeExperts = Callable[[int, Tensor, Tensor], Experts]  # (layer, w13, w2)


def random_weights(seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Weights by name, scaled so that every stage has values of order one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * gain / math.sqrt(shape[-1])).to(dtype).to(device)

    hidden, intermediate, experts = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"], CONFIG["num_experts"]
    width = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    weights = {
        "embedding": normal(CONFIG["vocab_size"], hidden, gain=math.sqrt(hidden)),
        "head": normal(CONFIG["vocab_size"], hidden),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        weights[f"{layer}.qkv"] = normal(3 * width, hidden)
        weights[f"{layer}.o"] = normal(hidden, width)
        weights[f"{layer}.router"] = normal(experts, hidden)
        weights[f"{layer}.w13"] = normal(experts, 2 * intermediate, hidden)
        weights[f"{layer}.w2"] = normal(experts, hidden, intermediate, gain=3.0)
    return weights


class TinyMoE(nn.Module):
    """The whole decoder; `make_experts` says how its expert layers are computed."""

    embedding: Tensor
    head: Tensor

    def __init__(self, weights: dict[str, Tensor], make_experts: MakeExperts, *, batch: int, max_length: int) -> None:
        super().__init__()
        self.register_buffer("embedding", weights["embedding"])
        self.register_buffer("head", weights["head"])
        self.layers = nn.ModuleList(
            _Layer(
                {name: weights[f"{i}.{name}"] for name in ("qkv", "o", "router")},
                make_experts(i, weights[f"{i}.w13"], weights[f"{i}.w2"]),
                batch,
                max_length,
            )
            for i in range(CONFIG["num_hidden_layers"])
        )

    def forward(self, tokens: Tensor, position: Tensor, slots: Tensor, given_ids: Tensor) -> tuple[Tensor, Tensor]:
        """One decode step.

        Args:
            tokens: (B,) int64. position: (1,) int64, the same for all sequences. slots: (B,) int32 adapter slots, -1 none.
            given_ids: (layers, B, K) int32, experts to take instead of the router's choice; -1 leaves it to the router.

        Returns: logits (B, vocabulary), and the experts taken (layers, B, K) int32.
        """
        x = F.embedding(tokens, self.embedding)
        ids = []
        for i, layer in enumerate(self.layers):
            x, layer_ids = layer(x, position, slots, given_ids[i])
            ids.append(layer_ids)
        return F.linear(_norm(x), self.head), torch.stack(ids)


class _Layer(nn.Module):
    qkv: Tensor
    o: Tensor
    router: Tensor
    keys: Tensor
    values: Tensor
    place: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, weights: dict[str, Tensor], experts: Experts, batch: int, max_length: int) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_buffer(name, weight)
        heads, head_dim = CONFIG["num_attention_heads"], CONFIG["head_dim"]
        for name in ("keys", "values"):
            self.register_buffer(name, weights["qkv"].new_zeros(batch, heads, max_length, head_dim))
        place = torch.arange(max_length, device=weights["qkv"].device)
        angle = place[:, None] / 10000.0 ** (torch.arange(0, head_dim, 2, device=place.device) / head_dim)
        self.register_buffer("place", place)
        self.register_buffer("cos", angle.cos().to(weights["qkv"].dtype))
        self.register_buffer("sin", angle.sin().to(weights["qkv"].dtype))
        self.experts = experts

    def forward(self, x: Tensor, position: Tensor, slots: Tensor, given_ids: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self._attend(_norm(x), position)
        h = _norm(x)
        probability = F.linear(h, self.router).to(torch.promote_types(h.dtype, torch.float32)).softmax(-1)
        chosen = probability.topk(given_ids.shape[1], dim=-1).indices
        ids = torch.where(given_ids >= 0, given_ids, chosen.int())
        weights = probability.gather(1, ids.long())
        weights = weights / weights.sum(-1, keepdim=True)
        return x + self.experts(h, weights, ids, slots), ids

    def _attend(self, h: Tensor, position: Tensor) -> Tensor:
        batch, heads, _, head_dim = self.keys.shape
        q, k, v = F.linear(h, self.qkv).view(batch, 3, heads, 1, head_dim).unbind(1)
        self.keys.index_copy_(2, position, self._rotate(k, position))
        self.values.index_copy_(2, position, v)
        seen = (self.place <= position)[None, :]
        out = F.scaled_dot_product_attention(self._rotate(q, position), self.keys, self.values, attn_mask=seen)
        return F.linear(out.reshape(batch, heads * head_dim), self.o)

    def _rotate(self, x: Tensor, position: Tensor) -> Tensor:
        cos, sin = self.cos[position], self.sin[position]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=CONFIG["rms_norm_eps"])
