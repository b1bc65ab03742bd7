#include "simd.h"

#include <cstdlib>
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

const Simd& choose() {
  const char* variable = std::getenv("MOELORA_CPU_CAPABILITY");
  const std::string bound = variable == nullptr || *variable == '\0' ? "avx512" : variable;
  if (bound != "default" && bound != "avx2" && bound != "avx512") {
    throw std::runtime_error("MOELORA_CPU_CAPABILITY must be default, avx2 or avx512, got '" + bound + "'");
  }
  if (bound == "avx512" && simd_avx512() != nullptr && machine_has_avx512()) return *simd_avx512();
  if (bound != "default" && simd_avx2() != nullptr && machine_has_avx2()) return *simd_avx2();
  return *simd_portable();
}

}  // namespace

const Simd& simd() {
  static const Simd& chosen = choose();
  return chosen;
}

}  // namespace moelora
