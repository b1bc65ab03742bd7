// The kernels for AVX-512 (F, BW, VL, DQ). The whole file below the includes is compiled for it.
#include "simd.h"

#if defined(__x86_64__) && defined(__GNUC__)
#if !defined(__clang__)  // GCC 12's own AVX-512 header trips them (fixed in 13)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

namespace moelora {
namespace {

#include "simd_avx512.h"
#include "simd_kernels.h"

constexpr Simd kSimd = make("avx512");

}  // namespace

const Simd* simd_avx512() { return &kSimd; }

}  // namespace moelora

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
namespace moelora {
const Simd* simd_avx512() { return nullptr; }
}  // namespace moelora
#endif
