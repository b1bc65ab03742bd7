// The C entry of route, called by kernels/native.py through ctypes: no torch, no allocation, one launch.
#include "route.h"

#include "launch.h"
#include "route.cuh"
#include "route_few.cuh"

using namespace moelora;

namespace {

enum RouteFlags { kWideIds = 1, kWideMapping = 2, kWideEnabled = 4, kWideMap = 8, kDependent = 16 };

constexpr int kNotServed = -1;

}  // namespace

int moelora_route(const RouteArgs* args, void* stream) {
  const Device device = current_device();
  const int64_t num_keys = static_cast<int64_t>(args->num_experts) * (args->max_loras + int64_t{1});
  if (device.shared == 0 || num_keys > INT32_MAX || args->num_tiles < 0) return kNotServed;

  RouteProblem problem{};
  problem.pairs.topk_ids = {args->topk_ids, (args->flags & kWideIds) != 0};
  problem.pairs.token_lora_mapping = {args->token_lora_mapping, (args->flags & kWideMapping) != 0};
  if (args->max_loras > 0) problem.pairs.adapter_enabled = {args->adapter_enabled, (args->flags & kWideEnabled) != 0};
  problem.pairs.expert_map = {args->expert_map, (args->flags & kWideMap) != 0};
  problem.pairs.top_k = Divisor(args->top_k);
  problem.pairs.num_pairs = args->num_pairs;
  problem.pairs.num_experts = args->num_experts;
  problem.pairs.num_global_experts = args->num_global_experts;
  problem.pairs.max_loras = args->max_loras;
  problem.lora_ranks = args->lora_ranks;
  problem.rank_tiles = args->rank_tiles;
  problem.per_expert = Divisor(args->max_loras + 1);
  problem.block_m = Divisor(args->block_m);
  problem.segment_m = Divisor(args->segment_m);
  const int64_t num_pairs = args->num_pairs;
  problem.tables.counts = args->tables;
  problem.tables.order = problem.tables.counts + 4;
  problem.tables.row_tiles = problem.tables.order + num_pairs;
  problem.tables.expert_blocks = problem.tables.row_tiles + num_pairs * 2;
  problem.tables.segment_blocks = problem.tables.expert_blocks + static_cast<int64_t>(args->num_expert_blocks) * 3;
  problem.tables.tiles = problem.tables.segment_blocks + static_cast<int64_t>(args->num_segment_blocks) * 4;

  const bool dependent = (args->flags & kDependent) != 0;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (num_pairs <= kFewPairs) return launch<route_few>(device, problem, 1, kFewThreads, 0, dependent, cuda_stream);
  const bool narrow = std::max(args->num_pairs, args->num_tiles) < 65536;
  const auto size = [&](const SortPlan& plan) {
    Carver carver{nullptr, 0};
    if (narrow) RouteShared<uint16_t>(carver, plan, args->num_experts, args->max_loras);
    else RouteShared<int32_t>(carver, plan, args->num_experts, args->max_loras);
    return carver.bytes;
  };
  const auto run = [&](auto kernel_launch, int most_ctas) -> int {
    const size_t bytes = plan_sort(device, num_pairs, num_keys, num_pairs <= kOneCtaPairs ? 1 : most_ctas, size, &problem.plan);
    return bytes == 0 ? kNotServed
                      : kernel_launch(device, problem, problem.plan.ctas, kThreads, bytes, dependent, cuda_stream);
  };
  if (narrow) return run(launch<route_cluster<uint16_t>, RouteProblem>, max_ctas<route_cluster<uint16_t>>(device));
  return run(launch<route_cluster<int32_t>, RouteProblem>, max_ctas<route_cluster<int32_t>>(device));
}
