// Schemas of the public ops for processes without Python; there `moelora_ops` defines them (meta/, whose strings these are:
// tests/test_export.py compares them). A second definition is an error of torch's that would end the process from here.
#include <torch/csrc/stable/library.h>

#include <cstdio>
#include <exception>

STABLE_TORCH_LIBRARY_FRAGMENT(moelora, m) {
  const char* const schemas[] = {
      "moe_lora_align_block_size(Tensor topk_ids, Tensor token_lora_mapping, SymInt num_experts, SymInt block_size, "
      "SymInt max_loras, *, Tensor? adapter_enabled=None, Tensor? expert_map=None) "
      "-> (Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded)",
      "fused_moe_lora(Tensor(a!) output, Tensor hidden_states, Tensor[] lora_a_stacked, Tensor[] lora_b_stacked, "
      "Tensor topk_weights, Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded, *, "
      "Tensor? lora_ranks=None, bool mul_routed_weight=False, SymInt offset=0) -> ()",
      "fused_experts_lora(Tensor hidden_states, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
      "Tensor token_lora_mapping, Tensor? lora_a13, Tensor? lora_b13, Tensor? lora_a2, Tensor? lora_b2, *, "
      "Tensor? lora_ranks=None, Tensor? adapter_enabled=None, Tensor? w13_bias=None, Tensor? w2_bias=None, "
      "Tensor? expert_map=None, str activation=\"silu\", bool gated=True, bool interleaved=False, "
      "float swiglu_alpha=1.702, float? swiglu_limit=None, bool apply_router_weight_on_input=False, "
      "float routed_scaling_factor=1.0) -> Tensor",
  };
  for (const char* schema : schemas) {
    try {
      m.def(schema);
    } catch (const std::exception&) {
      std::fprintf(stderr, "moelora _C_schemas: an op is defined already. This library is for processes without Python's "
                           "moelora_ops, and is loaded once.\n");
      return;
    }
  }
}
