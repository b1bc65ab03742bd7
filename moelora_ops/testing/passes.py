"""Modules that the Inductor rewrites are for, in many spellings, and modules that are nearly so.

Each module is forward(x, token_lora_mapping) with a router of its own, so that ids are known to be experts; `exact` is the same
in fp64, with `reference` in place of the ops.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import reference

EAGER = (
    "einsum", "flat table", "matmul", "product", "raw", "not minus one", "scaling", "weighted", "shared", "negative experts",
    "masked fill", "alpha", "pairs", "where index",
)  # fmt: skip
NEAR_EAGER = ("read twice", "gelu between", "other slots", "other experts", "transposed", "subtracted")
ACTIVATIONS = (
    "chunk", "slice", "unbind", "split", "rows", "sigmoid", "gelu", "gelu tanh", "relu2", "weighted", "not gated"
)  # fmt: skip
NEAR_ACTIVATIONS = ("read twice", "swapped", "interleaved", "offset", "clamped", "tanh", "gate alone", "doubled", "one slice")
LAYERS = ("einsum", "weight in the sum", "weight contracted", "not gated", "scaled", "histogram", "search")
NEAR_LAYERS = ("unknown ids", "read twice", "other weight", "other experts", "two tensors", "bias")

MAX_LORAS, RANK, BLOCK_SIZE = 3, 8, 16


def batch(
    num_tokens: int, *, hidden_size: int = 32, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """x [T, H] and slots with some -1."""
    generator = torch.Generator(device).manual_seed(1000 * seed + num_tokens)
    x = torch.randn(num_tokens, hidden_size, generator=generator, device=device).to(dtype)
    return x, torch.randint(-1, MAX_LORAS, (num_tokens,), generator=generator, device=device, dtype=torch.int32)


class _Block(nn.Module):
    """Router, base weights and adapters."""

    ops: Any
    w13: Tensor
    w2: Tensor
    lora_a13: Tensor
    lora_b13: Tensor
    lora_a1: Tensor
    lora_a2: Tensor
    lora_b2: Tensor
    router: Tensor
    scaling: Tensor

    def __init__(
        self, spelling: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu", num_experts: int = 6, top_k: int = 2,
        hidden_size: int = 32, intermediate_size: int = 24, max_loras: int = MAX_LORAS, rank: int = RANK,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spelling, self.num_experts, self.top_k, self.max_loras = spelling, num_experts, top_k, max_loras
        self.dtype, self.ops = dtype, torch.ops.moelora
        self.intermediate_size, self.gated = intermediate_size, spelling != "not gated"
        e, h, i, l, r = num_experts, hidden_size, intermediate_size, max_loras, rank
        slices = 2 if self.gated else 1
        shapes = {
            "w13": (e, slices * i, h), "w2": (e, h, i), "lora_a13": (l, e, slices * r, h), "lora_b13": (l, e, slices * i, r),
            "lora_a2": (l, e, r, i), "lora_b2": (l, e, h, r), "lora_a1": (l, e, r, h), "router": (e, h),
        }  # fmt: skip
        generator = torch.Generator(device).manual_seed(3)
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5
            self.register_buffer(name, values if name == "router" else values.to(dtype))
        self.register_buffer("scaling", torch.linspace(0.5, 2.0, l, device=device).to(dtype))

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.spelling}"

    def exact(self, x: Tensor, mapping: Tensor) -> Tensor:
        """The result in fp64."""
        other = copy.copy(self)
        other._buffers = {name: b if b is None or name == "router" else b.double() for name, b in self._buffers.items()}
        other.ops = reference
        return other(x.double(), mapping)  # type: ignore[no-any-return]

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights fp32 and ids int32, [T, K]; the same in every precision of x."""
        weights, ids = F.linear(x.float(), self.router).softmax(-1).topk(self.top_k)
        return weights, ids.int()

    def align(self, ids: Tensor, mapping: Tensor) -> Any:
        return self.ops.moe_lora_align_block_size(ids, mapping, self.num_experts, BLOCK_SIZE, self.max_loras)

    def slices(self) -> tuple[list[Tensor], list[Tensor]]:
        slices = 2 if self.gated else 1
        return list(self.lora_a13.chunk(slices, dim=2)), list(self.lora_b13.chunk(slices, dim=2))

    def first_base(self, x: Tensor, ids: Tensor) -> Tensor:
        """W13[e] x, as one matrix product and a choice: not what a rewrite takes for a base of experts."""
        dense = (x @ self.w13.flatten(0, 1).T).view(len(x), self.num_experts, -1)
        return dense.gather(1, ids.long()[..., None].expand(-1, -1, dense.shape[2]))


class Eager(_Block):
    """A base and the delta of the first projection, as people write it in plain PyTorch."""

    def forward(self, x: Tensor, mapping: Tensor) -> Tensor:
        weights, ids = self.route(x)
        base, a, b = self.first_base(x, ids), self.lora_a1, self.lora_b13
        name, e, k = self.spelling, self.num_experts, self.top_k
        slot, has = mapping.clamp(min=0), mapping >= 0
        mask = has[:, None, None]
        if name == "flat table":
            flat = (slot.unsqueeze(1) * e + ids).flatten()
            z = torch.bmm(a.flatten(0, 1).index_select(0, flat), x.repeat_interleave(k, 0).unsqueeze(-1))
            delta = (b.flatten(0, 1)[flat] @ z).squeeze(-1).view(len(x), k, -1)
            return base + delta * has.to(x.dtype).view(-1, 1, 1)
        if name == "pairs":
            slots, experts = slot.repeat_interleave(k), ids.flatten()
            z = torch.einsum("prh,ph->pr", a[slots, experts], x.repeat_interleave(k, 0))
            delta = torch.einsum("pnr,pr->pn", b[slots, experts], z) * has.repeat_interleave(k)[:, None]
            return (base.flatten(0, 1) + delta).view_as(base)
        if name == "where index":
            slot = torch.where(has, mapping, 0)
        if name == "raw":
            slot = mapping
        if name == "negative experts":
            ids = ids - 1
        at = (slot[:, None], ids)
        if name == "shared":
            a_of = a[:, 0].contiguous()[slot][:, None].expand(-1, k, -1, -1)
        elif name == "transposed":
            a_of = a.transpose(2, 3).contiguous()[at].transpose(2, 3)
        else:
            a_of = a[at]
        if name == "other slots":
            b_of = b[((slot + 1) % self.max_loras)[:, None], ids]
        elif name == "other experts":
            b_of = b[slot[:, None], ids.flip(1)]
        else:
            b_of = b[at]
        if name == "matmul":
            delta = (b_of @ (a_of @ x[:, None, :, None])).squeeze(-1)
        elif name == "product":
            z = (a_of * x[:, None, None, :]).sum(-1)
            delta = (b_of * z[:, :, None, :]).sum(-1)
        else:
            z = torch.einsum("th,tkrh->tkr", x, a_of)
            if name == "gelu between":
                z = F.gelu(z)
            delta = torch.einsum("tkr,tknr->tkn", z, b_of)
        if name == "raw":
            return base + delta
        if name == "not minus one":
            mask = (mapping != -1)[:, None, None]
        if name == "scaling":
            delta = delta * self.scaling[slot][:, None, None]
        if name == "weighted":
            delta = delta * weights[..., None].to(x.dtype)
        if name == "masked fill":
            return base + delta.masked_fill(~mask, 0.0) * 0.5
        delta = torch.where(mask, delta, 0)
        if name == "subtracted":
            return base - delta
        if name == "alpha":
            return torch.add(base, delta, alpha=0.5)
        result = base + delta * 0.5
        return result + z.mean() if name == "read twice" else result


class Activated(_Block):
    """The delta op on the first base, and the activation."""

    def forward(self, x: Tensor, mapping: Tensor) -> Tensor:
        weights, ids = self.route(x)
        name, i = self.spelling, self.intermediate_size
        base = self.first_base(x, ids)
        a, b = self.slices()
        options: dict[str, Any] = {"mul_routed_weight": True} if name == "weighted" else {}
        if name == "one slice":
            a, b = a[:1], [self.lora_b13]
        if name == "offset":
            base, options = torch.cat([base[..., :8], base], dim=-1), {"offset": 8}
        self.ops.fused_moe_lora(base, x, a, b, weights, *self.align(ids, mapping), **options)
        if name == "offset":
            base = base[..., : 2 * i]
        if name == "rows":
            base = base.view(-1, 2 * i)
        if name == "not gated":
            return F.relu(base).square()
        if name in ("slice", "rows"):
            gate, up = base[..., :i], base[..., i:]
        elif name == "unbind":
            gate, up = base.view(*base.shape[:-1], 2, i).unbind(-2)
        elif name == "split":
            gate, up = base.split([i, i], dim=-1)
        elif name == "interleaved":
            gate, up = base[..., ::2], base[..., 1::2]
        else:
            gate, up = base.chunk(2, dim=-1)
        if name == "swapped":
            gate, up = up, gate
        if name == "clamped":
            gate = gate.clamp(max=1.0)
        if name == "gate alone":
            return F.silu(gate)
        if name == "sigmoid":
            return gate * up * torch.sigmoid(gate)
        functions: dict[str, Any] = {
            "gelu": F.gelu, "gelu tanh": lambda t: F.gelu(t, approximate="tanh"), "relu2": lambda t: F.relu(t) ** 2,
            "tanh": torch.tanh, "doubled": lambda t: 2 * F.silu(t),
        }  # fmt: skip
        result: Tensor = functions.get(name, F.silu)(gate) * up
        return result + base.mean() if name == "read twice" else result


class Layer(_Block):
    """A whole expert layer around the ops, as an engine has it."""

    def __init__(self, spelling: str, **options: Any) -> None:
        grouped = spelling in ("histogram", "search")
        super().__init__(spelling, **{**({"dtype": torch.bfloat16} if grouped else {}), **options})
        if spelling == "two tensors":
            gate, up = self.lora_a13.chunk(2, dim=2)
            self.a_gate, self.a_up = nn.Buffer(gate.clone()), nn.Buffer(up.clone())
        self.bias = nn.Buffer(torch.ones_like(self.w13[..., 0]))

    def product(self, x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        """W[e] x for each pair; x has a row for each token or each pair."""
        per_pair = x.dim() == 3
        if self.spelling not in ("histogram", "search") or weight.dtype == torch.float64:
            return torch.einsum("tkh,tknh->tkn" if per_pair else "th,tknh->tkn", x, weight[ids])
        sorted_ids, order = ids.flatten().sort()
        if self.spelling == "histogram":
            counted = sorted_ids.float() if ids.device.type == "cpu" else sorted_ids
            ends = torch.histc(counted, bins=len(weight), min=0, max=len(weight) - 1).cumsum(0, dtype=torch.int32)
        else:
            experts = torch.arange(len(weight), dtype=sorted_ids.dtype, device=ids.device)
            ends = torch.searchsorted(sorted_ids, experts, right=True).int()
        rows = x.flatten(0, 1)[order] if per_pair else x[order // self.top_k]
        y = torch._grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
        if self.spelling == "histogram":
            out = torch.empty_like(y)
            out[order] = y
        else:
            out = y[order.argsort()]
        return out.view(*ids.shape, -1)

    def forward(self, x: Tensor, mapping: Tensor) -> Tensor:
        weights, ids = self.route(x)
        name = self.spelling
        if name == "unknown ids":
            ids = torch.where(weights > 2.0, -1, ids)
        gate_up = self.product(x, self.w13, ids.flip(1) if name == "other experts" else ids)
        if name == "bias":
            gate_up = gate_up + self.bias[ids]
        a, b = self.slices()
        if name == "two tensors":
            a = [self.a_gate, self.a_up]
        self.ops.fused_moe_lora(gate_up, x, a, b, weights, *self.align(ids, mapping))
        if name == "not gated":
            h = F.relu(gate_up) ** 2
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            h = F.silu(gate) * up
        in_sum = name in ("weight in the sum", "weight contracted", "histogram", "search")
        down = self.product(h, self.w2, ids)
        if not in_sum:
            down = down * (weights.square() if name == "other weight" else weights)[..., None].to(down.dtype)
        self.ops.fused_moe_lora(
            down, h.flatten(0, 1), [self.lora_a2], [self.lora_b2], weights, *self.align(ids, mapping),
            mul_routed_weight=not in_sum,
        )  # fmt: skip
        if name == "weight contracted":
            return x + torch.einsum("tkh,tk->th", down, weights.to(down.dtype))
        result = (down * weights[..., None].to(down.dtype) if in_sum else down).sum(1)
        if name == "scaled":
            result = result * 2.5
        return x + (result + h.mean() if name == "read twice" else result)


class Aligns(nn.Module):
    """Several alignments, flattened into one tensor; `change` of the arguments of the second."""

    def __init__(self, **change: Any) -> None:
        super().__init__()
        self.change = change

    def forward(self, ids: Tensor, mapping: Tensor) -> Tensor:
        first: dict[str, Any] = dict(ids=ids, mapping=mapping, experts=8, block=16, loras=3, enabled=None)
        second = first | {name: f(first[name]) for name, f in self.change.items()}
        tables = []
        for call in (first, second):
            aligned = torch.ops.moelora.moe_lora_align_block_size(
                call["ids"].int(), call["mapping"], call["experts"], call["block"], call["loras"],
                adapter_enabled=call["enabled"],
            )  # fmt: skip
            tables += [t.flatten() for t in aligned]
        return torch.cat(tables)
