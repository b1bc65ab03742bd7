// The kernels for AVX2 with FMA and F16C. The whole file below the includes is compiled for them.
#include "simd.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

namespace moelora {
namespace {

using Vec = __m256;
constexpr int64_t kLanes = 8;
constexpr int kTileRows = 4;  // 4 x 3 accumulators + 3 weights + 1 input of 16 registers
constexpr int kTileCols = 3;

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec broadcast(float value) { return _mm256_set1_ps(value); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Vec load(const Float16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

template <class T>
inline Vec load_part(const T* p, int64_t count) {
  T part[kLanes] = {};
  __builtin_memcpy(part, p, count * sizeof(T));
  return load(part);
}

inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline void store(BFloat16* p, Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i rounded = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), is_nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
inline void store(Float16* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Lane i of the result is the sum over the lanes of a[i].
inline Vec lane_sums(const Vec* a) {
  const Vec low = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
  const Vec high = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

#include "simd_kernels.h"

constexpr Simd kSimd = make("avx2");

}  // namespace

const Simd* simd_avx2() { return &kSimd; }

}  // namespace moelora

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
namespace moelora {
const Simd* simd_avx2() { return nullptr; }
}  // namespace moelora
#endif
