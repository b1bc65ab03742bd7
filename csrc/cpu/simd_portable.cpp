// The kernels without instruction-set extensions: four lanes that any compiler maps to its baseline (SSE2, NEON).
#include "simd.h"

namespace moelora {
namespace {

struct Vec {
  float lane[4];
};
constexpr int64_t kLanes = 4;
constexpr int kTileRows = 4;
constexpr int kTileCols = 2;

inline Vec broadcast(float value) { return {{value, value, value, value}}; }
inline Vec zero() { return broadcast(0.0f); }
inline Vec fma(Vec a, Vec b, Vec c) {
  for (int i = 0; i < kLanes; ++i) c.lane[i] += a.lane[i] * b.lane[i];
  return c;
}
inline Vec mul(Vec a, Vec b) {
  for (int i = 0; i < kLanes; ++i) a.lane[i] *= b.lane[i];
  return a;
}

template <class T>
inline Vec load_part(const T* p, int64_t count) {
  Vec v = zero();
  for (int64_t i = 0; i < count; ++i) v.lane[i] = to_float(p[i]);
  return v;
}
template <class T>
inline Vec load(const T* p) {
  return load_part(p, kLanes);
}
template <class T>
inline void store(T* p, Vec v) {
  for (int i = 0; i < kLanes; ++i) from_float(v.lane[i], p[i]);
}

// Lane i of the result is the sum over the lanes of a[i].
inline Vec lane_sums(const Vec* a) {
  Vec sums;
  for (int i = 0; i < kLanes; ++i) sums.lane[i] = (a[i].lane[0] + a[i].lane[1]) + (a[i].lane[2] + a[i].lane[3]);
  return sums;
}

#include "simd_kernels.h"

constexpr Simd kSimd = make("default");

}  // namespace

const Simd* simd_portable() { return &kSimd; }

}  // namespace moelora
