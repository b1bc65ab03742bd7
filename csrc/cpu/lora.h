// What both LoRA ops share: stacked adapter tensors, the shrunk rows, and the shrink itself.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "parallel.h"
#include "routing.h"
#include "simd.h"

namespace moelora {

constexpr int64_t kRowBlock = 96;  // rows that share a pass over a weight; their packed depth block (384 KB) stays in L2

// One slice of a stacked A [L, E, R, in] or B [L, E, out, R]; strides in elements, the last dimension is contiguous.
struct Stacked {
  const char* data;
  int64_t slot_stride;
  int64_t expert_stride;  // 0: one for all experts
  int64_t row_stride;

  const char* at(DType dtype, int64_t slot, int64_t expert, int64_t row) const {
    return data + (slot * slot_stride + expert * expert_stride + row * row_stride) * element_size(dtype);
  }
};

// Rank of each slot, clamped to [0, max_rank].
std::vector<int64_t> slot_ranks(const Ids* lora_ranks, int64_t max_loras, int64_t max_rank);

// Input rows in sorted order.
struct InputRows {
  DType dtype;
  int64_t depth;
  std::vector<const void*> rows;
  std::vector<float> scale;  // empty: 1

  // Whether these rows can be multiplied with bf16 weights as they are. A router weight makes them fp32.
  bool in_pairs(const Simd& simd) const { return dtype == kBFloat16 && scale.empty() && simd.gemm_pairs != nullptr; }

  void pack(const Simd& simd, int64_t begin, int64_t end, float* packed) const {
    const auto run = in_pairs(simd) ? simd.pack_pairs : simd.pack[dtype];
    run(rows.data() + begin, scale.empty() ? nullptr : scale.data() + begin, end - begin, depth, packed);
  }

  // The product of these rows, packed, with weights of `weight_dtype`.
  auto gemm(const Simd& simd, DType weight_dtype) const { return in_pairs(simd) ? simd.gemm_pairs : simd.gemm[weight_dtype]; }
};

using Buffer = std::shared_ptr<float[]>;  // captured by stages

inline Buffer allocate(int64_t size) { return Buffer(new float[std::max<int64_t>(size, 1)]); }

// z[row, s] = A_s[l, e] x[row] in fp32, per slice; zero from a slot's rank up to the next multiple of kMaxLanes.
class Shrunk {
 public:
  Shrunk(int64_t num_rows, int64_t num_slices, int64_t max_rank)
      : slice_stride_(round_up(max_rank, kMaxLanes)), row_stride_(num_slices * slice_stride_), z_(num_rows * row_stride_) {}

  // Fills z. What is passed by reference, and this object, must outlive the stage.
  Stage stage(const Parallel& parallel, DType dtype, const std::vector<Segment>& segments, const InputRows& x,
              const std::vector<Stacked>& a, const std::vector<int64_t>& ranks);

  const float* at(int64_t row, int64_t slice) const { return z_.data() + row * row_stride_ + slice * slice_stride_; }

 private:
  int64_t slice_stride_, row_stride_;
  std::vector<float> z_;
};

}  // namespace moelora
