// The vector primitives of simd_kernels.h for AVX-512. Included inside the anonymous namespace of the files that use them.

using Vec = __m512;
constexpr int64_t kLanes = 16;
constexpr int kTileRows = 6;  // 6 x 4 accumulators + 4 weights + 1 input of 32 registers
constexpr int kTileCols = 4;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec broadcast(float value) { return _mm512_set1_ps(value); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }

inline Vec widen_bf16(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const BFloat16* p) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec load(const Float16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
inline Vec load_part(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), p); }
inline Vec load_part(const BFloat16* p, int64_t count) { return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(count), p)); }
inline Vec load_part(const Float16* p, int64_t count) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count), p));
}

inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline void store(BFloat16* p, Vec v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
inline void store(Float16* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Lane i of the result is the sum over the lanes of a[i].
inline Vec lane_sums(const Vec* a) {
  Vec pair[8], quad[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // 128-bit quarters 0 + 2 and 1 + 3 of a[i] (low half) and a[i + 8] (high half)
    const Vec low = _mm512_shuffle_f32x4(a[i], a[i + 8], 0x44), high = _mm512_shuffle_f32x4(a[i], a[i + 8], 0xee);
    pair[i] = _mm512_add_ps(low, high);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // quarters: a[i], a[i + 8], a[i + 4], a[i + 12]
    const Vec even = _mm512_shuffle_f32x4(pair[i], pair[i + 4], 0x88), odd = _mm512_shuffle_f32x4(pair[i], pair[i + 4], 0xdd);
    quad[i] = _mm512_add_ps(even, odd);
  }
  const Vec t01 = _mm512_add_ps(_mm512_unpacklo_ps(quad[0], quad[1]), _mm512_unpackhi_ps(quad[0], quad[1]));
  const Vec t23 = _mm512_add_ps(_mm512_unpacklo_ps(quad[2], quad[3]), _mm512_unpackhi_ps(quad[2], quad[3]));
  const Vec sums = _mm512_add_ps(_mm512_shuffle_ps(t01, t23, 0x44), _mm512_shuffle_ps(t01, t23, 0xee));
  return _mm512_shuffle_f32x4(sums, sums, 0xd8);  // quarters held a[0..], a[8..], a[4..], a[12..]
}
