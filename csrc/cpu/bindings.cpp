// Registers the CPU kernels. With bindings_checks.h the only file with PyTorch headers: LibTorch's stable ABI at target 2.11.
// Schemas are defined by the Python package (meta/) or, without Python, by csrc/schemas.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "align.h"
#include "bindings_checks.h"
#include "fused_experts_lora.h"
#include "fused_moe_lora.h"

namespace {

using moelora::Enabled;
using moelora::Ids;
using moelora::OptionalTensor;
using moelora::Stacked;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

moelora::DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return moelora::kFloat32;
    case ScalarType::BFloat16:
      return moelora::kBFloat16;
    case ScalarType::Half:
      return moelora::kFloat16;
    default:
      STD_TORCH_CHECK(false, "dtype must be float32, bfloat16 or float16");
  }
}

const char* data_of(const Tensor& tensor) { return static_cast<const char*>(tensor.const_data_ptr()); }

Ids ids_of(const Tensor& tensor) {
  const bool is_matrix = tensor.dim() == 2;
  return {tensor.const_data_ptr(),         tensor.scalar_type() == ScalarType::Long,
          tensor.size(0),                  is_matrix ? tensor.size(1) : 1,
          tensor.stride(0),                is_matrix ? tensor.stride(1) : 0};
}

std::optional<Ids> ids_of(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<Ids>(ids_of(*tensor)) : std::nullopt;
}

// Contiguous, not initialised. torch::stable::new_empty asks the dispatcher by name: three times what this takes.
template <size_t dims>
Tensor empty(const std::array<int64_t, dims>& sizes, int32_t dtype) {
  std::array<int64_t, dims> strides;
  int64_t stride = 1;
  for (size_t dim = dims; dim-- > 0; stride *= std::max<int64_t>(sizes[dim], 1)) strides[dim] = stride;
  AtenTensorHandle tensor = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dims, sizes.data(), strides.data(), dtype, aoti_torch_device_type_cpu(), 0, &tensor));
  return Tensor(tensor);
}

template <class T>
const T* pointer(const std::optional<T>& value) {
  return value ? &*value : nullptr;
}

Enabled enabled_of(const std::optional<Tensor>& tensor) {
  if (!tensor) return {nullptr, false, 0};
  return {tensor->const_data_ptr(), tensor->scalar_type() == ScalarType::Bool, tensor->stride(0)};
}

// Slice `slice` of a stacked tensor whose slices are `rows_per_slice` rows apart.
Stacked stacked_of(const Tensor& tensor, int64_t slice = 0, int64_t rows_per_slice = 0) {
  const int64_t offset = slice * rows_per_slice * tensor.stride(2) * moelora::element_size(dtype_of(tensor));
  return {data_of(tensor) + offset, tensor.stride(0), tensor.size(1) == 1 ? 0 : tensor.stride(1), tensor.stride(2)};
}

moelora::Parallel parallel() {
  return {static_cast<int64_t>(torch::stable::get_num_threads()),
          [](int64_t num_workers, const std::function<void(int64_t)>& work) {
            torch::stable::parallel_for(0, num_workers, 1, [&](int64_t begin, int64_t end) {
              for (int64_t worker = begin; worker < end; ++worker) work(worker);
            });
          }};
}

std::tuple<Tensor, Tensor, Tensor> moe_lora_align_block_size(const Tensor& topk_ids, const Tensor& token_lora_mapping,
                                                             int64_t num_experts, int64_t block_size, int64_t max_loras,
                                                             const OptionalTensor& adapter_enabled,
                                                             const OptionalTensor& expert_map) {
  if (!moelora::fits_align(topk_ids, token_lora_mapping, num_experts, block_size, max_loras, adapter_enabled, expert_map)) {
    moelora::ask_python("moelora_native::objection_moe_lora_align_block_size", topk_ids, token_lora_mapping, num_experts,
                        block_size, max_loras, adapter_enabled, expert_map);
  }
  const int64_t num_pairs = topk_ids.size(0) * topk_ids.size(1);
  const int64_t capacity =
      moelora::round_up(std::min(num_pairs * block_size, num_pairs + num_experts * (block_size - 1)), block_size);
  const int32_t int32 = aoti_torch_dtype_int32();
  const Tensor sorted_token_ids = empty<2>({max_loras, capacity}, int32);
  const Tensor expert_ids = empty<2>({max_loras, capacity / block_size}, int32);
  const Tensor num_tokens_post_padded = empty<1>({max_loras}, int32);
  const std::optional<Ids> map = ids_of(expert_map);
  moelora::moe_lora_align_block_size({ids_of(topk_ids), ids_of(token_lora_mapping), num_experts, block_size, max_loras,
                                      enabled_of(adapter_enabled), pointer(map), capacity,
                                      sorted_token_ids.mutable_data_ptr<int32_t>(), expert_ids.mutable_data_ptr<int32_t>(),
                                      num_tokens_post_padded.mutable_data_ptr<int32_t>()});
  return {sorted_token_ids, expert_ids, num_tokens_post_padded};
}

void fused_moe_lora(const Tensor& output, const Tensor& hidden_states, const Tensors& lora_a_stacked,
                    const Tensors& lora_b_stacked, const Tensor& topk_weights, const Tensor& sorted_token_ids,
                    const Tensor& expert_ids, const Tensor& num_tokens_post_padded, const OptionalTensor& lora_ranks,
                    bool mul_routed_weight, int64_t offset) {
  if (!moelora::fits_delta(output, hidden_states, lora_a_stacked, lora_b_stacked, topk_weights, sorted_token_ids, expert_ids,
                           num_tokens_post_padded, lora_ranks, offset)) {
    moelora::ask_python("moelora_native::objection_fused_moe_lora", output, hidden_states, lora_a_stacked, lora_b_stacked,
                        topk_weights, sorted_token_ids, expert_ids, num_tokens_post_padded, lora_ranks, mul_routed_weight,
                        offset);
  }
  const std::optional<Ids> ranks = ids_of(lora_ranks);
  moelora::FusedMoeLora p{};
  p.dtype = dtype_of(output);
  p.output = static_cast<char*>(output.mutable_data_ptr());
  p.num_tokens = output.size(0), p.top_k = output.size(1);
  p.token_stride = output.stride(0), p.choice_stride = output.stride(1);
  p.hidden_states = data_of(hidden_states);
  p.num_inputs = hidden_states.size(0), p.in_features = hidden_states.size(1), p.input_stride = hidden_states.stride(0);
  p.num_experts = std::numeric_limits<int64_t>::max();
  for (const auto* stack : {&lora_a_stacked, &lora_b_stacked}) {
    for (const Tensor& t : *stack) {
      if (t.size(1) != 1) p.num_experts = std::min(p.num_experts, t.size(1));
    }
  }
  for (const Tensor& a : lora_a_stacked) p.lora_a.push_back(stacked_of(a));
  for (const Tensor& b : lora_b_stacked) p.lora_b.push_back(stacked_of(b));
  p.max_rank = lora_b_stacked[0].size(3), p.width = lora_b_stacked[0].size(2);
  if (mul_routed_weight) p.topk_weights = topk_weights.const_data_ptr<float>();
  p.weight_token_stride = topk_weights.stride(0), p.weight_choice_stride = topk_weights.stride(1);
  p.sorted_token_ids = ids_of(sorted_token_ids), p.expert_ids = ids_of(expert_ids);
  p.num_tokens_post_padded = ids_of(num_tokens_post_padded);
  p.lora_ranks = pointer(ranks);
  p.offset = offset;
  moelora::fused_moe_lora(p, parallel());
}

std::optional<moelora::Activation> activation_of(const std::string& name) {
  if (name == "silu") return moelora::Activation::kSilu;
  if (name == "gelu") return moelora::Activation::kGelu;
  if (name == "gelu_tanh") return moelora::Activation::kGeluTanh;
  if (name == "relu2") return moelora::Activation::kRelu2;
  if (name == "swigluoai") return moelora::Activation::kSwigluOai;
  return std::nullopt;
}

moelora::ExpertWeight expert_weight(const Tensor& weight, const OptionalTensor& bias) {
  return {data_of(weight), weight.stride(0), weight.stride(1), bias ? data_of(*bias) : nullptr, bias ? bias->stride(0) : 0};
}

std::optional<moelora::LoraPair> lora_pair(const std::optional<Tensor>& a, const std::optional<Tensor>& b, int64_t num_slices,
                                           const Ids* ranks) {
  if (!a || !b) return std::nullopt;
  const int64_t max_rank = b->size(3);
  moelora::LoraPair pair{{}, stacked_of(*b), moelora::slot_ranks(ranks, b->size(0), max_rank), max_rank};
  for (int64_t slice = 0; slice < num_slices; ++slice) pair.a.push_back(stacked_of(*a, slice, max_rank));
  return pair;
}

Tensor fused_experts_lora(const Tensor& hidden_states, const Tensor& w13, const Tensor& w2, const Tensor& topk_weights,
                          const Tensor& topk_ids, const Tensor& token_lora_mapping, const OptionalTensor& lora_a13,
                          const OptionalTensor& lora_b13, const OptionalTensor& lora_a2, const OptionalTensor& lora_b2,
                          const OptionalTensor& lora_ranks, const OptionalTensor& adapter_enabled,
                          const OptionalTensor& w13_bias, const OptionalTensor& w2_bias, const OptionalTensor& expert_map,
                          StringHandle activation_handle, bool gated, bool interleaved, double swiglu_alpha,
                          std::optional<double> swiglu_limit, bool apply_router_weight_on_input,
                          double routed_scaling_factor) {
  const std::string activation_name = moelora::text_of(activation_handle);
  const std::optional<moelora::Activation> activation = activation_of(activation_name);
  const bool needs_gate = interleaved || activation == moelora::Activation::kSwigluOai;
  if (!activation || !moelora::fits_experts(hidden_states, w13, w2, topk_weights, topk_ids, token_lora_mapping, lora_a13,
                                            lora_b13, lora_a2, lora_b2, lora_ranks, adapter_enabled, w13_bias, w2_bias,
                                            expert_map, needs_gate, gated, swiglu_limit)) {
    moelora::ask_python("moelora_native::objection_fused_experts_lora", hidden_states, w13, w2, topk_weights, topk_ids,
                        token_lora_mapping, lora_a13, lora_b13, lora_a2, lora_b2, lora_ranks, adapter_enabled, w13_bias,
                        w2_bias, expert_map, activation_name, gated, interleaved, swiglu_alpha, swiglu_limit,
                        apply_router_weight_on_input, routed_scaling_factor);
  }
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(hidden_states.get(), &dtype));
  const Tensor output = empty<2>({hidden_states.size(0), hidden_states.size(1)}, dtype);
  const std::optional<Ids> ranks = ids_of(lora_ranks), map = ids_of(expert_map);
  const float limit = swiglu_limit ? static_cast<float>(*swiglu_limit) : std::numeric_limits<float>::infinity();
  moelora::FusedExpertsLora p{};
  p.dtype = dtype_of(hidden_states);
  p.num_tokens = topk_ids.size(0), p.top_k = topk_ids.size(1), p.num_experts = w13.size(0);
  p.hidden_size = w2.size(1), p.intermediate_size = w2.size(2);
  p.hidden_states = {data_of(hidden_states), hidden_states.stride(0)};
  p.output = static_cast<char*>(output.mutable_data_ptr());
  p.w13 = expert_weight(w13, w13_bias), p.w2 = expert_weight(w2, w2_bias);
  p.topk_weights = topk_weights.const_data_ptr<float>();
  p.weight_token_stride = topk_weights.stride(0), p.weight_choice_stride = topk_weights.stride(1);
  p.topk_ids = ids_of(topk_ids), p.token_lora_mapping = ids_of(token_lora_mapping);
  p.expert_map = pointer(map);
  p.enabled = enabled_of(adapter_enabled);
  p.max_loras = lora_b13 ? lora_b13->size(0) : lora_b2 ? lora_b2->size(0) : 0;
  p.lora13 = lora_pair(lora_a13, lora_b13, gated ? 2 : 1, pointer(ranks));
  p.lora2 = lora_pair(lora_a2, lora_b2, 1, pointer(ranks));
  p.activation = {*activation, gated, static_cast<float>(swiglu_alpha), limit};
  p.interleaved = interleaved, p.apply_router_weight_on_input = apply_router_weight_on_input;
  p.routed_scaling_factor = static_cast<float>(routed_scaling_factor);
  moelora::fused_experts_lora(p, parallel());
  return output;
}

}  // namespace

// The public ops, with or without Python, and the same kernels where Python calls them below autograd.
STABLE_TORCH_LIBRARY_IMPL(moelora, CPU, m) {
  m.impl("moe_lora_align_block_size", TORCH_BOX(&moe_lora_align_block_size));
  m.impl("fused_moe_lora", TORCH_BOX(&fused_moe_lora));
  m.impl("fused_experts_lora", TORCH_BOX(&fused_experts_lora));
}

STABLE_TORCH_LIBRARY_IMPL(moelora_native, CPU, m) {
  m.impl("moe_lora_align_block_size", TORCH_BOX(&moe_lora_align_block_size));
  m.impl("fused_moe_lora", TORCH_BOX(&fused_moe_lora));
  m.impl("fused_experts_lora", TORCH_BOX(&fused_experts_lora));
}
