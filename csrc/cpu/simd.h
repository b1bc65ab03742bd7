// The vectorised kernels, one set per instruction set, chosen once per process.
//
// Weights are [out, in] row-major, so a product is a dot of a weight row with each input row: every weight row is read once,
// in unit stride, for a whole tile of input rows (decode is memory-bound), and nothing is re-laid out. An output element is
// summed in an order that depends on the depth and the rank alone: lane j adds the elements j, j + lanes, ... of each block of
// kDepthBlock, then the lanes are added as a fixed tree. Results are therefore independent of batch mates and of threads.
#pragma once

#include <cstdint>

#include "numeric.h"

namespace moelora {

constexpr int64_t kMaxLanes = 16;

// The adapter of one input row, added to the accumulators of a product: B[n, :rank] . z[:rank].
struct RowDelta {
  const float* z;    // shrunk row, zero from rank up to the next multiple of kMaxLanes
  const void* b;     // B at the first output column; elements past `rank` of a row are never read into a result
  int64_t b_stride;  // elements between rows of B
  int64_t rank;      // 0: no adapter, the row is not touched
};

// c[m, n] = sum_k x[m, k] * w[n, k] (+ delta), fp32.
struct Gemm {
  const void* x;          // rows packed by the `pack` that belongs to the kernel
  const void* w;          // [cols, depth]
  int64_t w_stride;       // elements between rows of w
  int64_t rows;           // <= kRowBlock
  int64_t cols;
  int64_t depth;          // 0: the delta alone
  const RowDelta* delta;  // one per row, or nullptr
  float* c;
  int64_t c_stride;
  const void* next_w = nullptr;  // what the same thread will probably read next, as w; only a hint
};

enum class Activation : int { kSilu, kGelu, kGeluTanh, kRelu2, kSwigluOai };

struct ActivationSpec {
  Activation kind;
  bool gated;
  float alpha;
  float limit;  // infinity: no clamp
};

struct Simd {
  const char* name;
  // rows[m] (of `dtype`) * scale[m] (nullptr: 1) widened to fp32 in the layout that gemm reads; scratch of packed_size floats.
  void (*pack[kNumDTypes])(const void* const* rows, const float* scale, int64_t num_rows, int64_t depth, void* packed);
  void (*gemm[kNumDTypes])(const Gemm&);  // by the dtype of w and b
  // out = act(gate, up); `up` is ignored when not gated.
  void (*activate)(const ActivationSpec&, const float* gate, const float* up, int64_t count, float* out);
  void (*add_scaled[kNumDTypes])(void* out, const float* delta, float scale, int64_t count);    // out += scale * delta
  void (*round_scaled[kNumDTypes])(void* out, const float* value, float scale, int64_t count);  // out = scale * value
  // bf16 inputs without a scale, and bf16 weights, multiplied without widening; nullptr where the machine cannot.
  void (*pack_pairs)(const void* const* rows, const float* scale, int64_t num_rows, int64_t depth, void* packed);
  void (*gemm_pairs)(const Gemm&);
};

// Floats that hold packed rows in either layout.
inline int64_t packed_size(int64_t num_rows, int64_t depth) { return num_rows * round_up(depth, kMaxLanes); }

// The best set this machine runs. MOELORA_CPU_CAPABILITY=default, avx2, avx512 or avx512_bf16 sets an upper bound, read once.
const Simd& simd();

// nullptr where the compiler does not target the instruction set.
const Simd* simd_portable();
const Simd* simd_avx2();
const Simd* simd_avx512();
bool use_bf16_pairs(Simd& avx512);  // adds the pair kernels; false where the compiler does not target them

}  // namespace moelora
