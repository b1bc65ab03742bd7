#include "fused_experts_lora.h"

#include <algorithm>

namespace moelora {
namespace {

constexpr int64_t kGateUpCols = 32;  // activation columns of a gate_up task: 64 weight rows
constexpr int64_t kDownCols = 64;    // output columns of a down task

// One call: the stages shrink, gate_up, shrink, down, combine.
class Layer {
 public:
  Layer(const FusedExpertsLora& problem, const Parallel& parallel)
      : p_(problem),
        parallel_(parallel),
        kernels_(simd()),
        expert_of_pair_(pair_experts(p_.topk_ids, p_.num_experts, p_.expert_map)) {
    const bool has_lora = p_.lora13 || p_.lora2;
    const std::vector<int32_t> slots =
        has_lora ? token_slots(p_.token_lora_mapping, p_.max_loras, p_.enabled) : std::vector<int32_t>(p_.num_tokens, -1);
    routing_ = route(expert_of_pair_, slots, p_.top_k, p_.num_experts, has_lora ? p_.max_loras : 0);
    blocks_ = expert_blocks(routing_, kRowBlock);
    slot_of_row_.reserve(routing_.order.size());
    for (const Segment& s : routing_.segments) slot_of_row_.insert(slot_of_row_.end(), s.end - s.begin, s.slot);
  }

  void run() {
    const int64_t num_rows = routing_.order.size();
    // fp32, not rounded to the input dtype: as exact as it gets, and re-reading it costs little next to the weights.
    const Buffer act = allocate(num_rows * p_.intermediate_size);
    const Buffer y = allocate(p_.num_tokens * p_.top_k * p_.hidden_size);  // [P, H] in pair order
    const InputRows x = layer_input();
    InputRows h{kFloat32, p_.intermediate_size, {}, {}};
    for (int64_t row = 0; row < num_rows; ++row) h.rows.push_back(act.get() + row * p_.intermediate_size);

    std::optional<Shrunk> z13 = shrunk(p_.lora13), z2 = shrunk(p_.lora2);
    std::vector<Stage> stages;
    if (z13) stages.push_back(z13->stage(parallel_, p_.dtype, routing_.segments, x, p_.lora13->a, p_.lora13->ranks));
    stages.push_back(gate_up(x, z13 ? &*z13 : nullptr, act.get()));
    if (z2) stages.push_back(z2->stage(parallel_, p_.dtype, routing_.segments, h, p_.lora2->a, p_.lora2->ranks));
    stages.push_back(down(h, z2 ? &*z2 : nullptr, y.get()));
    stages.push_back(combine(y.get()));
    parallel_.run(stages);
  }

 private:
  float weight_of(int64_t pair) const {
    return p_.topk_weights[pair / p_.top_k * p_.weight_token_stride + pair % p_.top_k * p_.weight_choice_stride];
  }

  InputRows layer_input() const {
    InputRows x{p_.dtype, p_.hidden_size, {}, {}};
    for (int32_t pair : routing_.order) {
      x.rows.push_back(p_.hidden_states.data + pair / p_.top_k * p_.hidden_states.stride * element_size(p_.dtype));
      if (p_.apply_router_weight_on_input) x.scale.push_back(weight_of(pair));
    }
    return x;
  }

  // Room for the shrunk rows; nothing when no row has an adapter.
  std::optional<Shrunk> shrunk(const std::optional<LoraPair>& lora) const {
    const std::vector<int32_t>& slots = slot_of_row_;
    if (!lora || std::all_of(slots.begin(), slots.end(), [](int32_t slot) { return slot < 0; })) return std::nullopt;
    return Shrunk(slots.size(), lora->a.size(), lora->max_rank);
  }

  struct Tile {
    const RowBlock* block;
    int64_t col, num_cols;
  };

  // Calls run(tile, the tile after it or nullptr, packed input rows, scratch) for every block of rows and of columns.
  template <class Run>
  Stage for_each_tile(const InputRows& x, int64_t num_cols, int64_t col_block, int64_t scratch_cols, const Run& run) const {
    const int64_t per_block = divide_up(num_cols, col_block), num_tasks = static_cast<int64_t>(blocks_.size()) * per_block;
    const int64_t num_workers = parallel_.num_threads;
    int64_t most_rows = 0;
    for (const RowBlock& block : blocks_) most_rows = std::max(most_rows, block.end - block.begin);
    const int64_t packed_floats = packed_size(most_rows, x.depth), worker_floats = packed_floats + most_rows * scratch_cols;
    const Buffer buffer = allocate(num_workers * worker_floats);
    constexpr int64_t kLine = 8;  // workers write to cache lines of their own
    auto packed_block = std::make_shared<std::vector<const RowBlock*>>(num_workers * kLine, nullptr);
    return {num_tasks, [=, &x](int64_t worker, int64_t task) {
      const auto tile_of = [&](int64_t i) -> Tile {
        const int64_t col = i % per_block * col_block;
        return {&blocks_[i / per_block], col, std::min(col_block, num_cols - col)};
      };
      float* packed = buffer.get() + worker * worker_floats;
      const Tile tile = tile_of(task), next = task + num_workers < num_tasks ? tile_of(task + num_workers) : Tile{};
      const RowBlock*& has_packed = (*packed_block)[worker * kLine];
      if (has_packed != tile.block) x.pack(kernels_, tile.block->begin, tile.block->end, packed);
      has_packed = tile.block;
      run(tile, next.block == nullptr ? nullptr : &next, packed, packed + packed_floats);
    }};
  }

  const char* rows_of(const ExpertWeight& weight, const RowBlock& block, int64_t row) const {
    return weight.data + (block.expert * weight.expert_stride + row * weight.row_stride) * element_size(p_.dtype);
  }

  // c = x W[e, first_row + n * step].T + bias + delta for the rows of a block; `next` will probably be read after this.
  void project(const RowBlock& block, const InputRows& x, const float* packed, const ExpertWeight& weight,
               int64_t first_row, int64_t step, int64_t cols, const char* next, const std::optional<LoraPair>& lora,
               const Shrunk* z, int64_t slice, float* c, int64_t c_stride) const {
    const int64_t rows = block.end - block.begin;
    RowDelta deltas[kRowBlock];
    if (z != nullptr) {
      for (int64_t m = 0; m < rows; ++m) {
        const int32_t slot = slot_of_row_[block.begin + m];
        deltas[m] = {nullptr, nullptr, 0, 0};
        if (slot < 0) continue;
        const char* b = lora->b.at(p_.dtype, slot, block.expert, first_row);
        deltas[m] = {z->at(block.begin + m, slice), b, lora->b.row_stride * step, lora->ranks[slot]};
      }
    }
    x.gemm(kernels_, p_.dtype)({packed, rows_of(weight, block, first_row), weight.row_stride * step, rows, cols, x.depth,
                                z == nullptr ? nullptr : deltas, c, c_stride, next});
    if (weight.bias == nullptr) return;
    const char* bias = weight.bias + block.expert * weight.bias_stride * element_size(p_.dtype);
    for (int64_t n = 0; n < cols; ++n) {
      const float value = load_element(p_.dtype, bias, first_row + n * step);
      for (int64_t m = 0; m < rows; ++m) c[m * c_stride + n] += value;
    }
  }

  // act[row] = activation(W13[e] x + b13[e] + delta)
  Stage gate_up(const InputRows& x, const Shrunk* z, float* act) const {
    const int64_t width = p_.intermediate_size, stride = 2 * kGateUpCols, step = p_.interleaved ? 2 : 1;
    return for_each_tile(x, width, kGateUpCols, stride,
                         [=, &x](const Tile& tile, const Tile* next, const float* packed, float* scratch) {
      const RowBlock& block = *tile.block;
      const int64_t gate_row = tile.col * step, up_row = p_.interleaved ? gate_row + 1 : width + tile.col;
      float *gate = scratch, *up = scratch + kGateUpCols;
      const char* next_gate = next == nullptr ? nullptr : rows_of(p_.w13, *next->block, next->col * step);
      const char* next_up = p_.activation.gated ? rows_of(p_.w13, block, up_row) : next_gate;
      project(block, x, packed, p_.w13, gate_row, step, tile.num_cols, next_up, p_.lora13, z, 0, gate, stride);
      if (p_.activation.gated) {
        project(block, x, packed, p_.w13, up_row, step, tile.num_cols, next_gate, p_.lora13, z, 1, up, stride);
      }
      for (int64_t m = 0; m < block.end - block.begin; ++m) {
        float* out = act + (block.begin + m) * width + tile.col;
        kernels_.activate(p_.activation, gate + m * stride, up + m * stride, tile.num_cols, out);
      }
    });
  }

  // y[pair] = w (W2[e] act + b2[e] + delta)
  Stage down(const InputRows& h, const Shrunk* z, float* y) const {
    return for_each_tile(h, p_.hidden_size, kDownCols, kDownCols,
                         [=, &h](const Tile& tile, const Tile* next, const float* packed, float* scratch) {
      const RowBlock& block = *tile.block;
      const char* next_rows = next == nullptr ? nullptr : rows_of(p_.w2, *next->block, next->col);
      project(block, h, packed, p_.w2, tile.col, 1, tile.num_cols, next_rows, p_.lora2, z, 0, scratch, kDownCols);
      for (int64_t m = 0; m < block.end - block.begin; ++m) {
        const int64_t pair = routing_.order[block.begin + m];
        const float weight = p_.apply_router_weight_on_input ? 1.0f : weight_of(pair);
        kernels_.round_scaled[kFloat32](y + pair * p_.hidden_size + tile.col, scratch + m * kDownCols, weight, tile.num_cols);
      }
    });
  }

  // out[t] = routed_scaling_factor * sum_k y[t, k], summed in the order of k, rounded once.
  Stage combine(const float* y) const {
    const int64_t width = p_.hidden_size;
    const int64_t tokens_per_task = std::max<int64_t>(1, (1 << 17) / std::max<int64_t>(1, p_.top_k * width));
    const int64_t num_tasks = divide_up(p_.num_tokens, tokens_per_task);
    const Buffer sums = allocate(parallel_.num_threads * width);
    return {num_tasks, [=](int64_t worker, int64_t task) {
      float* sum = sums.get() + worker * width;
      for (int64_t t = task * tokens_per_task; t < std::min(p_.num_tokens, (task + 1) * tokens_per_task); ++t) {
        std::fill_n(sum, width, 0.0f);
        for (int64_t pair = t * p_.top_k; pair < (t + 1) * p_.top_k; ++pair) {
          if (expert_of_pair_[pair] >= 0) kernels_.add_scaled[kFloat32](sum, y + pair * width, 1.0f, width);
        }
        kernels_.round_scaled[p_.dtype](p_.output + t * width * element_size(p_.dtype), sum, p_.routed_scaling_factor, width);
      }
    }};
  }

  const FusedExpertsLora& p_;
  const Parallel& parallel_;
  const Simd& kernels_;
  std::vector<int32_t> expert_of_pair_;
  Routing routing_;
  std::vector<RowBlock> blocks_;
  std::vector<int32_t> slot_of_row_;
};

}  // namespace

void fused_experts_lora(const FusedExpertsLora& problem, const Parallel& parallel) { Layer(problem, parallel).run(); }

}  // namespace moelora
