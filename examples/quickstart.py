import torch
from moelora_ops import fused_experts_lora

T, K, E, L, R, H, I = 6, 2, 8, 3, 16, 64, 32  # tokens, top_k, experts, adapter slots, rank, hidden, intermediate
x = torch.randn(T, H)
w13, w2 = torch.randn(E, 2 * I, H) / 8, torch.randn(E, H, I) / 8
topk_weights, topk_ids = torch.randn(T, E).softmax(-1).topk(K)
slots = torch.tensor([0, 1, -1, 2, 0, -1])  # the adapter of each token, -1: none
adapters = (
    torch.randn(L, E, 2 * R, H) / 8,  # A of gate and up
    torch.randn(L, E, 2 * I, R) / 8,  # B of gate and up, times alpha / r
    torch.randn(L, E, R, I) / 8,  # A of down
    torch.randn(L, E, H, R) / 8,  # B of down, times alpha / r
)
ranks = torch.tensor([4, 8, 16], dtype=torch.int32)
layer = torch.compile(fused_experts_lora, fullgraph=True)
y = layer(x, w13, w2, topk_weights, topk_ids, slots, *adapters, lora_ranks=ranks)
base = layer(x, w13, w2, topk_weights, topk_ids, slots)
print("without an adapter, the same bits:", torch.equal(y[slots < 0], base[slots < 0]))
