// Products of bf16 inputs with bf16 weights for AVX-512 BF16: two multiply-adds a lane, nothing is widened. The products
// are exact and added in fp32, so this is as exact as the fp32 kernels (but numbers below 2^-126 count as zero).
#include "simd.h"

#if defined(__x86_64__) && defined(__GNUC__)
#if !defined(__clang__)  // GCC 12's own AVX-512 header trips them (fixed in 13)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")
#endif

namespace moelora {
namespace {

#include "simd_avx512.h"
#include "simd_kernels.h"

struct PairProduct {
  using X = BFloat16;
  using W = BFloat16;
  using WVec = __m512bh;
  static constexpr int64_t kStep = 2 * kLanes;

  static __m512bh load_x(const X* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static WVec load_w(const W* p) { return load_x(p); }
  static WVec load_w_part(const W* p, int64_t count) {
    return (__m512bh)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << count) - 1), p);
  }
  static Vec add_product(Vec acc, __m512bh x, WVec w) { return _mm512_dpbf16_ps(acc, x, w); }
};

void pack_pairs(const void* const* rows, const float*, int64_t num_rows, int64_t depth, void* packed) {
  constexpr int64_t kStep = PairProduct::kStep;
  const int64_t padded = round_up(depth, kStep);
  for (int64_t tile = 0; tile < num_tiles(num_rows); ++tile) {
    const int64_t begin = tile_begin(num_rows, tile), height = tile_begin(num_rows, tile + 1) - begin;
    for (int64_t m = 0; m < height; ++m) {
      const BFloat16* row = static_cast<const BFloat16*>(rows[begin + m]);
      BFloat16* out = static_cast<BFloat16*>(packed) + begin * padded + m * kStep;
      for (int64_t k = 0; k < depth; k += kStep, out += height * kStep) {
        const __m512bh value = depth - k >= kStep ? PairProduct::load_w(row + k) : PairProduct::load_w_part(row + k, depth - k);
        _mm512_storeu_si512(out, (__m512i)value);
      }
    }
  }
}

}  // namespace

bool use_bf16_pairs(Simd& set) {
  set.name = "avx512_bf16";
  set.pack_pairs = pack_pairs;
  set.gemm_pairs = gemm<PairProduct>;
  return true;
}

}  // namespace moelora

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
namespace moelora {
bool use_bf16_pairs(Simd&) { return false; }
}  // namespace moelora
#endif
