// Registers the CUDA C++ kernels under the private namespace; the public ops have checked every argument before.
#include <algorithm>
#include <optional>
#include <tuple>

#include "align_chunks.cuh"
#include "launch.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

using moelora::ceil_div;

constexpr int64_t kMaxChunks = 64;  // every place CTA reads all counts: 64 chunks of 1024 keys are 256 KB of L2 reads
constexpr int64_t kOneCtaFill = 8192;     // elements of the outputs, filled by one CTA in the time of a cluster's barriers
constexpr int64_t kClusterFill = 1 << 20;  // 4 MB: beyond, a second launch costs less than filling from 8 CTAs

Tensor empty_int32(const Tensor& like, std::initializer_list<int64_t> size) {
  return torch::stable::new_empty(like, size, ScalarType::Int);
}

moelora::Ids ids(const Tensor& contiguous) {
  return {contiguous.const_data_ptr(), contiguous.scalar_type() == ScalarType::Long};
}

std::optional<Tensor> contiguous(const std::optional<Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  return torch::stable::contiguous(*tensor);
}

cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// False, and nothing launched, where the device has no clusters or one cluster is not the fastest.
bool align_in_one_launch(moelora::AlignProblem& problem, cudaStream_t stream) {
  const moelora::Device device = moelora::current_device();
  const int64_t num_pairs = problem.pairs.num_pairs, to_fill = problem.rows_of_all_slots();
  if (device.shared == 0 || to_fill > kClusterFill) return false;
  const int64_t num_keys = static_cast<int64_t>(problem.pairs.max_loras) * problem.pairs.num_experts;
  const bool narrow = num_pairs < 65536, one_cta = num_pairs <= moelora::kOneCtaPairs && to_fill <= kOneCtaFill;
  const auto size = [&](const moelora::SortPlan& plan) {
    moelora::Carver carver{nullptr, 0};
    if (narrow) moelora::AlignShared<uint16_t>(carver, plan);
    else moelora::AlignShared<int32_t>(carver, plan);
    return carver.bytes;
  };
  const int most_ctas = one_cta ? 1
                        : narrow ? moelora::max_ctas<moelora::align_cluster<uint16_t>>(device)
                                 : moelora::max_ctas<moelora::align_cluster<int32_t>>(device);
  const size_t bytes = moelora::plan_sort(device, num_pairs, num_keys, most_ctas, size, &problem.plan);
  if (bytes == 0) return false;
  const auto kernel = narrow ? moelora::launch<moelora::align_cluster<uint16_t>, moelora::AlignProblem>
                             : moelora::launch<moelora::align_cluster<int32_t>, moelora::AlignProblem>;
  const cudaError_t error = kernel(device, problem, problem.plan.ctas, moelora::kThreads, bytes, true, stream);
  STD_TORCH_CHECK(error == cudaSuccess, "moe_lora_align_block_size: ", cudaGetErrorString(error));
  return true;
}

void align_in_two_launches(const moelora::AlignProblem& problem, const Tensor& topk_ids, cudaStream_t stream) {
  const int64_t num_pairs = problem.pairs.num_pairs;
  const int64_t num_keys = static_cast<int64_t>(problem.pairs.max_loras) * problem.pairs.num_experts;
  // At most 4 P / keys chunks: the tables stay O(P + keys) whatever the number of keys.
  const int64_t wanted = std::min({kMaxChunks, ceil_div(num_pairs, moelora::kChunkThreads), 4 * num_pairs / num_keys});
  const int64_t tiles_per_chunk = ceil_div(ceil_div(num_pairs, std::max<int64_t>(wanted, 1)), moelora::kChunkThreads);
  const int64_t chunk_pairs = tiles_per_chunk * moelora::kChunkThreads;
  const int64_t num_chunks = ceil_div(num_pairs, chunk_pairs);
  const int64_t stride = num_keys + 1;
  Tensor keys = empty_int32(topk_ids, {num_pairs});
  Tensor tables = empty_int32(topk_ids, {3, num_chunks, stride});  // counts, cursors, first blocks

  moelora::ChunkedAlign chunked{};
  chunked.problem = problem;
  chunked.num_keys = static_cast<int>(num_keys);
  chunked.num_chunks = static_cast<int>(num_chunks);
  chunked.chunk_pairs = static_cast<int>(chunk_pairs);
  chunked.stride = static_cast<int>(stride);
  chunked.keys = keys.mutable_data_ptr<int32_t>();
  chunked.counts = tables.mutable_data_ptr<int32_t>();
  chunked.cursors = chunked.counts + num_chunks * stride;
  chunked.first_blocks = chunked.cursors + num_chunks * stride;
  const int64_t fill_ctas = ceil_div(problem.rows_of_all_slots(), moelora::kChunkThreads * moelora::kFillPerThread);
  moelora::align_count<<<static_cast<unsigned>(num_chunks + fill_ctas), moelora::kChunkThreads, 0, stream>>>(chunked);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  moelora::align_place<<<static_cast<unsigned>(num_chunks), moelora::kChunkThreads, 0, stream>>>(chunked);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

std::tuple<Tensor, Tensor, Tensor> moe_lora_align_block_size(Tensor topk_ids, Tensor token_lora_mapping, int64_t num_experts,
                                                             int64_t block_size, int64_t max_loras,
                                                             std::optional<Tensor> adapter_enabled,
                                                             std::optional<Tensor> expert_map) {
  const torch::stable::accelerator::DeviceGuard guard(topk_ids.get_device_index());
  const int64_t num_pairs = topk_ids.numel();
  const int64_t num_blocks =
      num_pairs == 0 ? 0 : ceil_div(std::min(num_pairs * block_size, num_pairs + num_experts * (block_size - 1)), block_size);
  Tensor sorted_token_ids = empty_int32(topk_ids, {max_loras, num_blocks * block_size});
  Tensor expert_ids = empty_int32(topk_ids, {max_loras, num_blocks});
  Tensor num_tokens_post_padded = empty_int32(topk_ids, {max_loras});
  if (num_pairs == 0 || max_loras == 0) {
    torch::stable::zero_(num_tokens_post_padded);
    return {sorted_token_ids, expert_ids, num_tokens_post_padded};
  }

  topk_ids = torch::stable::contiguous(topk_ids);
  token_lora_mapping = torch::stable::contiguous(token_lora_mapping);
  adapter_enabled = contiguous(adapter_enabled);
  expert_map = contiguous(expert_map);
  moelora::AlignProblem problem{};
  problem.pairs.topk_ids = ids(topk_ids);
  problem.pairs.token_lora_mapping = ids(token_lora_mapping);
  if (adapter_enabled) {
    problem.pairs.adapter_enabled = {adapter_enabled->const_data_ptr(), adapter_enabled->scalar_type() == ScalarType::Int};
  }
  if (expert_map) problem.pairs.expert_map = ids(*expert_map);
  problem.pairs.top_k = moelora::Divisor(static_cast<int>(topk_ids.size(1)));
  problem.pairs.num_pairs = static_cast<int>(num_pairs);
  problem.pairs.num_experts = problem.pairs.num_global_experts = static_cast<int>(num_experts);
  problem.pairs.max_loras = static_cast<int>(max_loras);
  problem.num_experts = moelora::Divisor(static_cast<int>(num_experts));
  problem.block_size = moelora::Divisor(static_cast<int>(block_size));
  problem.num_blocks = static_cast<int>(num_blocks);
  problem.sorted_token_ids = sorted_token_ids.mutable_data_ptr<int32_t>();
  problem.expert_ids = expert_ids.mutable_data_ptr<int32_t>();
  problem.num_tokens_post_padded = num_tokens_post_padded.mutable_data_ptr<int32_t>();
  const cudaStream_t stream = current_stream(topk_ids);
  if (!align_in_one_launch(problem, stream)) align_in_two_launches(problem, topk_ids, stream);
  return {sorted_token_ids, expert_ids, num_tokens_post_padded};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moelora_native, CUDA, m) {
  m.impl("moe_lora_align_block_size", TORCH_BOX(&moe_lora_align_block_size));
}
