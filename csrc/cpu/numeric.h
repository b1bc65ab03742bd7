// Element types of the tensors and their scalar conversions.
#pragma once

#include <cstdint>
#include <cstring>

namespace moelora {

enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kNumDTypes = 3 };

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

inline int64_t element_size(DType dtype) { return dtype == kFloat32 ? 4 : 2; }

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

inline int64_t divide_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) { return float_of_bits(uint32_t(value.bits) << 16); }

inline float to_float(Float16 value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16;
  const uint32_t magnitude = value.bits & 0x7fff;
  if (magnitude >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);  // inf, NaN
  if (magnitude < 0x400) return float_of_bits(sign | bits_of_float(float(magnitude) * 0x1p-24f));  // zero, subnormal
  return float_of_bits(sign | ((magnitude << 13) + (112u << 23)));
}

// Round to nearest, ties to even, as PyTorch does.
inline void from_float(float value, float& out) { out = value; }

inline void from_float(float value, BFloat16& out) {
  const uint32_t bits = bits_of_float(value);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  out.bits = is_nan ? uint16_t(0x7fc0) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void from_float(float value, Float16& out) {
  const uint32_t bits = bits_of_float(value);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    out.bits = sign | 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // 65520 and above round to infinity
    out.bits = sign | 0x7c00;
  } else if (magnitude < 0x38800000) {  // below 2^-14: the fp32 adder rounds to multiples of 2^-24
    out.bits = uint16_t(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f)));
  } else {
    out.bits = uint16_t(sign | ((magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13));
  }
}

// Element `index` of an array of any of the three types.
inline float load_element(DType dtype, const void* data, int64_t index) {
  switch (dtype) {
    case kBFloat16:
      return to_float(static_cast<const BFloat16*>(data)[index]);
    case kFloat16:
      return to_float(static_cast<const Float16*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

}  // namespace moelora
