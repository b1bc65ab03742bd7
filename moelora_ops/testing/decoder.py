"""A small MoE decoder of any size, whose expert layers are computed one way or another: what gets compiled and captured.

One step takes T tokens, one of each sequence (decode) or many of one (prefill). Nothing depends on values on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import reference
from ..adapters import LoraPool, MoeGeometry, PoolLayer
from ..layers import FusedMoEWithLoRA
from ..ops import fused_moe_lora, moe_lora_align_block_size

# (w13, w2, a layer of the pool) -> experts(x [T, H], topk_weights [T, K], topk_ids [T, K], token_lora_mapping [T]) -> [T, H]
MakeExperts = Callable[[Tensor, Tensor, PoolLayer], nn.Module]


@dataclass(frozen=True)
class DecoderSizes:
    """The defaults are tiny."""

    num_layers: int = 2
    hidden_size: int = 32
    intermediate_size: int = 24
    num_experts: int = 6
    top_k: int = 2
    num_heads: int = 4  # of queries
    num_kv_heads: int = 2
    head_dim: int = 8
    vocabulary: int = 64
    num_rows: int = 16  # sequences in the KV cache
    max_length: int = 8  # tokens of a sequence in the KV cache
    max_loras: int = 3
    max_rank: int = 8
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def geometry(self) -> MoeGeometry:
        layers = tuple(range(self.num_layers))
        return MoeGeometry(self.num_layers, layers, self.num_experts, self.hidden_size, self.intermediate_size)

    def pool(self) -> LoraPool:
        """An empty pool for all layers."""
        return LoraPool.from_config(
            self.geometry, max_loras=self.max_loras, max_rank=self.max_rank, dtype=self.dtype, device=self.device
        )


class Decoder(nn.Module):
    """Attention over a KV cache, router and experts in every layer; random weights by seed, values of order one.

    The cache has one row more than there are sequences: a token of row `num_rows` is padding, takes no expert and reaches
    nobody. There is no position encoding: nothing here depends on one.
    """

    embedding: Tensor
    head: Tensor

    def __init__(self, sizes: DecoderSizes, pool: LoraPool, make_experts: MakeExperts, *, seed: int = 0) -> None:
        super().__init__()
        s, normal = sizes, _normal(sizes, seed)
        self.sizes = sizes
        self.register_buffer("embedding", normal(s.vocabulary, s.hidden_size) * s.hidden_size**0.5)
        self.register_buffer("head", normal(s.vocabulary, s.hidden_size))
        self.layers = nn.ModuleList(_Layer(s, normal, pool.layer(i), make_experts) for i in range(s.num_layers))

    def forward(
        self, tokens: Tensor, rows: Tensor, positions: Tensor, slots: Tensor, given_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One step.

        Args:
            tokens: (T,) int64. rows: (T,) int64, sequence of each token, `num_rows` for padding. positions: (T,) int64 in it.
            slots: (T,) int32 or int64 adapter slots, -1 none.
            given_ids: (layers, T, K) int32, experts to take instead of the router's choice.

        Returns: logits (T, vocabulary), and the experts taken (layers, T, K) int32.
        """
        x, ids = F.embedding(tokens, self.embedding), []
        for i, layer in enumerate(self.layers):
            x, taken = layer(x, rows, positions, slots, None if given_ids is None else given_ids[i])
            ids.append(taken)
        return F.linear(_norm(x), self.head), torch.stack(ids)


class _Layer(nn.Module):
    qkv: Tensor
    o: Tensor
    router: Tensor
    keys: Tensor
    values: Tensor
    place: Tensor

    def __init__(self, sizes: DecoderSizes, normal: Callable[..., Tensor], lora: PoolLayer, make_experts: MakeExperts) -> None:
        super().__init__()
        s = self.sizes = sizes
        self.register_buffer("qkv", normal((s.num_heads + 2 * s.num_kv_heads) * s.head_dim, s.hidden_size))
        self.register_buffer("o", normal(s.hidden_size, s.num_heads * s.head_dim))
        self.register_buffer("router", 2 * normal(s.num_experts, s.hidden_size))
        cache = torch.zeros(s.num_rows + 1, s.max_length, s.num_kv_heads, s.head_dim, dtype=s.dtype, device=s.device)
        self.register_buffer("keys", cache)
        self.register_buffer("values", cache.clone())
        self.register_buffer("place", torch.arange(s.max_length, device=s.device))
        w13 = normal(s.num_experts, 2 * s.intermediate_size, s.hidden_size)
        self.experts = make_experts(w13, 2 * normal(s.num_experts, s.hidden_size, s.intermediate_size), lora)

    def forward(
        self, x: Tensor, rows: Tensor, positions: Tensor, slots: Tensor, given_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x = x + self._attend(_norm(x), rows, positions)
        h = _norm(x)
        probability = F.linear(h, self.router).to(torch.promote_types(h.dtype, torch.float32)).softmax(-1)
        chosen = probability.topk(self.sizes.top_k, dim=-1).indices if given_ids is None else given_ids.long().clamp(min=0)
        weights = probability.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        ids = torch.where((rows < self.sizes.num_rows)[:, None], chosen.int(), -1)
        return x + self.experts(h, weights, ids, slots), ids

    def _attend(self, h: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        s = self.sizes
        q, k, v = F.linear(h, self.qkv).split([n * s.head_dim for n in (s.num_heads, s.num_kv_heads, s.num_kv_heads)], dim=1)
        self.keys.index_put_((rows, positions), k.view(-1, s.num_kv_heads, s.head_dim))
        self.values.index_put_((rows, positions), v.view(-1, s.num_kv_heads, s.head_dim))
        # As products and sums: what torch has for attention or batched products looks whether the batch is one token, at
        # least in some version from 2.11 on, which an unbacked size does not allow.
        q = q.view(-1, s.num_kv_heads, s.num_heads // s.num_kv_heads, 1, s.head_dim)  # the queries of a head of the cache
        # [T, kv heads, 1, max_length, head_dim]
        k, v = (cache[rows].transpose(1, 2).unsqueeze(2) for cache in (self.keys, self.values))
        unseen = (self.place > positions[:, None])[:, None, None]
        scores = ((q * k).sum(-1) * s.head_dim**-0.5).masked_fill(unseen, -torch.inf)
        out = (scores.softmax(-1).unsqueeze(-1) * v).sum(3)
        return F.linear(out.view(-1, s.num_heads * s.head_dim), self.o)


class EngineExperts(nn.Module):
    """The expert layer as a serving engine has it: its own base GEMMs, one alignment, a delta on each of them."""

    w13: Tensor
    w2: Tensor

    def __init__(self, w13: Tensor, w2: Tensor, lora: PoolLayer, *, block_size: int = 16) -> None:
        super().__init__()
        self.register_buffer("w13", w13)
        self.register_buffer("w2", w2)
        self.lora, self.block_size = lora, block_size

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, mapping: Tensor) -> Tensor:
        lora, ranks, num_slots = self.lora, self.lora.lora_ranks, self.lora.lora_ranks.shape[0]
        aligned = moe_lora_align_block_size(
            topk_ids, mapping, self.w13.shape[0], self.block_size, num_slots, adapter_enabled=lora.adapter_enabled
        )
        a13, b13 = lora.lora_a13.chunk(2, dim=2), lora.lora_b13.chunk(2, dim=2)
        gate_up = self._gemm(self.w13, x.repeat_interleave(topk_ids.shape[1], dim=0), topk_ids)
        fused_moe_lora(gate_up, x, a13, b13, topk_weights, *aligned, lora_ranks=ranks)
        gate, up = gate_up.chunk(2, dim=-1)
        h = (F.silu(gate) * up).flatten(0, 1)
        down = self._gemm(self.w2, h, topk_ids)
        fused_moe_lora(down, h, [lora.lora_a2], [lora.lora_b2], topk_weights, *aligned, lora_ranks=ranks)
        y = torch.where((topk_ids >= 0)[..., None], topk_weights[..., None] * down, 0.0)
        return y.sum(1).to(x.dtype)

    def _gemm(self, weight: Tensor, rows: Tensor, topk_ids: Tensor) -> Tensor:
        """[T, K, out]: each pair's row times its expert's weight."""
        chosen = weight.index_select(0, topk_ids.flatten().clamp(min=0))
        return torch.bmm(chosen, rows.unsqueeze(-1)).view(*topk_ids.shape, weight.shape[1])


class ExactExperts(nn.Module):
    """The expert layer by the reference in fp64, whatever its input."""

    def __init__(self, w13: Tensor, w2: Tensor, lora: PoolLayer) -> None:
        super().__init__()
        self.weights, self.lora = (w13.double(), w2.double()), lora

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, mapping: Tensor) -> Tensor:
        lora = self.lora
        factors = [t.double() for t in (lora.lora_a13, lora.lora_b13, lora.lora_a2, lora.lora_b2)]
        return reference.fused_experts_lora(
            x.double(), *self.weights, topk_weights.double(), topk_ids, mapping, *factors,
            lora_ranks=lora.lora_ranks, adapter_enabled=lora.adapter_enabled,
        )  # fmt: skip


WAYS: dict[str, MakeExperts] = {"fused": FusedMoEWithLoRA, "engine": EngineExperts}


def exact_twin(sizes: DecoderSizes, pool: LoraPool, *, seed: int = 0) -> Decoder:
    """The decoder of the same sizes, seed and adapters in fp64; its cache is its own."""
    return Decoder(sizes, pool, ExactExperts, seed=seed).double()


def step_inputs(sizes: DecoderSizes, num_tokens: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens, rows, positions and slots of a step of `num_tokens` sequences at random places, one in four without adapter."""
    s, generator = sizes, torch.Generator().manual_seed(1000 * seed + num_tokens)
    if num_tokens > s.num_rows:
        raise ValueError(f"num_tokens must be <= num_rows = {s.num_rows}, got {num_tokens}")

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (num_tokens,), generator=generator).to(s.device)

    rows = torch.randperm(s.num_rows, generator=generator)[:num_tokens].to(s.device)
    return draw(0, s.vocabulary), rows, draw(0, s.max_length), draw(-1, s.max_loras).int()


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def _normal(sizes: DecoderSizes, seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator(sizes.device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device=sizes.device, dtype=torch.float32)
        return values.mul_(shape[-1] ** -0.5).to(sizes.dtype)

    return normal
