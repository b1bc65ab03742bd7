#include "simd.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <stdexcept>
#include <string>

namespace moelora {
namespace {

bool machine_has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // every AVX2 machine has F16C
#else
  return false;
#endif
}

bool machine_has_avx512() {
#if defined(__x86_64__)
  return machine_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

bool machine_has_avx512_bf16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

Simd choose() {
  const char* const levels[] = {"default", "avx2", "avx512", "avx512_bf16"};
  const char* variable = std::getenv("MOELORA_CPU_CAPABILITY");
  const std::string bound = variable == nullptr || *variable == '\0' ? levels[3] : variable;
  const auto level = std::find(std::begin(levels), std::end(levels), bound) - std::begin(levels);
  if (level > 3) {
    throw std::runtime_error("MOELORA_CPU_CAPABILITY must be default, avx2, avx512 or avx512_bf16, got '" + bound + "'");
  }
  if (level >= 2 && simd_avx512() != nullptr && machine_has_avx512()) {
    Simd set = *simd_avx512();
    if (level == 3 && machine_has_avx512_bf16()) use_bf16_pairs(set);
    return set;
  }
  if (level >= 1 && simd_avx2() != nullptr && machine_has_avx2()) return *simd_avx2();
  return *simd_portable();
}

}  // namespace

const Simd& simd() {
  static const Simd chosen = choose();
  return chosen;
}

}  // namespace moelora
