#include "fused_experts_lora.h"

#include <algorithm>
#include <memory>

namespace moelora {
namespace {

constexpr int64_t kGateUpCols = 32;  // activation columns of a gate_up task: 64 weight rows
constexpr int64_t kDownCols = 64;    // output columns of a down task

using Buffer = std::unique_ptr<float[]>;

Buffer allocate(int64_t size) { return Buffer(new float[std::max<int64_t>(size, 1)]); }

// One call, stage by stage. Every stage ends before the next begins.
class Layer {
 public:
  Layer(const FusedExpertsLora& problem, const Parallel& parallel)
      : p_(problem), parallel_(parallel), kernels_(simd()), expert_of_pair_(pair_experts(p_.topk_ids, p_.num_experts, p_.expert_map)) {
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
    const InputRows x = layer_input();
    std::optional<Shrunk> z13 = shrink(p_.lora13, x);
    // fp32, not rounded to the input dtype: as exact as it gets, and re-reading it costs little next to the weights.
    const Buffer act = allocate(num_rows * p_.intermediate_size);
    gate_up(x, z13 ? &*z13 : nullptr, act.get());

    InputRows h{kFloat32, p_.intermediate_size, {}, {}};
    for (int64_t row = 0; row < num_rows; ++row) h.rows.push_back(act.get() + row * p_.intermediate_size);
    std::optional<Shrunk> z2 = shrink(p_.lora2, h);
    const Buffer y = allocate(p_.num_tokens * p_.top_k * p_.hidden_size);  // [P, H] in pair order
    down(h, z2 ? &*z2 : nullptr, y.get());
    combine(y.get());
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

  std::optional<Shrunk> shrink(const std::optional<LoraPair>& lora, const InputRows& x) const {
    const std::vector<Segment>& segments = routing_.segments;
    if (!lora || std::all_of(segments.begin(), segments.end(), [](const Segment& s) { return s.slot < 0; })) return std::nullopt;
    Shrunk z(routing_.order.size(), lora->a.size(), lora->max_rank);
    z.compute(parallel_, p_.dtype, segments, x, lora->a, lora->ranks);
    return z;
  }

  // Calls run(block, packed input rows, first column, columns, scratch) for every block of rows and of columns.
  template <class Run>
  void for_each_tile(const InputRows& x, int64_t num_cols, int64_t col_block, int64_t scratch_cols, const Run& run) const {
    const int64_t num_tasks = static_cast<int64_t>(blocks_.size()) * divide_up(num_cols, col_block);
    const int64_t num_workers = std::min(parallel_.num_threads, num_tasks);
    int64_t most_rows = 0;
    for (const RowBlock& block : blocks_) most_rows = std::max(most_rows, block.end - block.begin);
    const int64_t packed_floats = packed_size(most_rows, x.depth), scratch_floats = most_rows * scratch_cols;
    const Buffer buffers = allocate(num_workers * (packed_floats + scratch_floats));
    std::vector<int64_t> packed_block(num_workers * 8, -1);  // what a worker has packed; a cache line each
    parallel_.for_each(num_tasks, [&](int64_t worker, int64_t task) {
      const int64_t index = task / divide_up(num_cols, col_block), col = task % divide_up(num_cols, col_block) * col_block;
      float* packed = buffers.get() + worker * (packed_floats + scratch_floats);
      const RowBlock& block = blocks_[index];
      if (packed_block[worker * 8] != index) x.pack(kernels_, block.begin, block.end, packed);
      packed_block[worker * 8] = index;
      run(block, packed, col, std::min(col_block, num_cols - col), packed + packed_floats);
    });
  }

  // c = x W[e, first_row + n * step].T + bias + delta, for the rows of a block.
  void project(const RowBlock& block, const float* packed, int64_t depth, const ExpertWeight& weight, int64_t first_row, int64_t step,
               int64_t cols, const std::optional<LoraPair>& lora, const Shrunk* z, int64_t slice, float* c, int64_t c_stride) const {
    const int64_t rows = block.end - block.begin, bytes = element_size(p_.dtype);
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
    const char* w = weight.data + (block.expert * weight.expert_stride + first_row * weight.row_stride) * bytes;
    kernels_.gemm[p_.dtype]({packed, w, weight.row_stride * step, rows, cols, depth, z == nullptr ? nullptr : deltas, c, c_stride});
    if (weight.bias == nullptr) return;
    const char* bias = weight.bias + block.expert * weight.bias_stride * bytes;
    for (int64_t n = 0; n < cols; ++n) {
      const float value = load_element(p_.dtype, bias, first_row + n * step);
      for (int64_t m = 0; m < rows; ++m) c[m * c_stride + n] += value;
    }
  }

  // act[row] = activation(W13[e] x + b13[e] + delta)
  void gate_up(const InputRows& x, const Shrunk* z, float* act) const {
    const int64_t width = p_.intermediate_size;
    for_each_tile(x, width, kGateUpCols, 2 * kGateUpCols,
                  [&](const RowBlock& block, const float* packed, int64_t col, int64_t cols, float* scratch) {
                    const int64_t stride = 2 * kGateUpCols, step = p_.interleaved ? 2 : 1;
                    float *gate = scratch, *up = scratch + kGateUpCols;
                    project(block, packed, x.depth, p_.w13, col * step, step, cols, p_.lora13, z, 0, gate, stride);
                    if (p_.activation.gated) {
                      const int64_t up_row = p_.interleaved ? 2 * col + 1 : width + col;
                      project(block, packed, x.depth, p_.w13, up_row, step, cols, p_.lora13, z, 1, up, stride);
                    }
                    for (int64_t m = 0; m < block.end - block.begin; ++m) {
                      float* out = act + (block.begin + m) * width + col;
                      kernels_.activate(p_.activation, gate + m * stride, up + m * stride, cols, out);
                    }
                  });
  }

  // y[pair] = w (W2[e] act + b2[e] + delta)
  void down(const InputRows& h, const Shrunk* z, float* y) const {
    for_each_tile(h, p_.hidden_size, kDownCols, kDownCols,
                  [&](const RowBlock& block, const float* packed, int64_t col, int64_t cols, float* scratch) {
                    project(block, packed, h.depth, p_.w2, col, 1, cols, p_.lora2, z, 0, scratch, kDownCols);
                    for (int64_t m = 0; m < block.end - block.begin; ++m) {
                      const int64_t pair = routing_.order[block.begin + m];
                      const float weight = p_.apply_router_weight_on_input ? 1.0f : weight_of(pair);
                      kernels_.round_scaled[kFloat32](y + pair * p_.hidden_size + col, scratch + m * kDownCols, weight, cols);
                    }
                  });
  }

  // out[t] = routed_scaling_factor * sum_k y[t, k], summed in the order of k, rounded once.
  void combine(const float* y) const {
    const int64_t width = p_.hidden_size, tokens_per_task = std::max<int64_t>(1, (1 << 17) / std::max<int64_t>(1, p_.top_k * width));
    const int64_t num_tasks = divide_up(p_.num_tokens, tokens_per_task);
    const Buffer sums = allocate(std::min(parallel_.num_threads, num_tasks) * width);
    parallel_.for_each(num_tasks, [&](int64_t worker, int64_t task) {
      float* sum = sums.get() + worker * width;
      for (int64_t t = task * tokens_per_task; t < std::min(p_.num_tokens, (task + 1) * tokens_per_task); ++t) {
        std::fill_n(sum, width, 0.0f);
        for (int64_t pair = t * p_.top_k; pair < (t + 1) * p_.top_k; ++pair) {
          if (expert_of_pair_[pair] >= 0) kernels_.add_scaled[kFloat32](sum, y + pair * width, 1.0f, width);
        }
        kernels_.round_scaled[p_.dtype](p_.output + t * width * element_size(p_.dtype), sum, p_.routed_scaling_factor, width);
      }
    });
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
