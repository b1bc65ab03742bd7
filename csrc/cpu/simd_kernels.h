// The kernels of simd.h, written once over the vector primitives of an instruction set.
//
// Included inside the anonymous namespace of simd_<isa>.cpp, after the primitives:
//   Vec, kLanes, kTileRows, kTileCols, zero, load(const T*), load_part(const T*, count), store(T*, Vec), fma, lane_sums.
// Nothing here may instantiate library code: the linker could keep the copy compiled for the larger instruction set.

constexpr int64_t kDepthBlock = 1024;  // kTileCols weight rows of a block fill half of a 32 KB L1

inline int64_t num_tiles(int64_t rows) { return divide_up(rows, kTileRows); }

// Rows are cut into tiles of nearly equal height: 8 rows are 4 + 4, not 6 + 2.
inline int64_t tile_begin(int64_t rows, int64_t tile) {
  const int64_t tiles = num_tiles(rows), larger = rows % tiles;
  return tile * (rows / tiles) + (tile < larger ? tile : larger);
}

// Packed layout: the tiles one after the other, each as [depth / lanes][rows of the tile][lanes], zero past the depth.
template <class T>
void pack(const void* const* rows, const float* scale, int64_t num_rows, int64_t depth, void* packed) {
  const int64_t padded = round_up(depth, kLanes);
  for (int64_t tile = 0; tile < num_tiles(num_rows); ++tile) {
    const int64_t begin = tile_begin(num_rows, tile), height = tile_begin(num_rows, tile + 1) - begin;
    for (int64_t m = 0; m < height; ++m) {
      const T* row = static_cast<const T*>(rows[begin + m]);
      const Vec factor = broadcast(scale == nullptr ? 1.0f : scale[begin + m]);
      float* out = static_cast<float*>(packed) + begin * padded + m * kLanes;
      for (int64_t k = 0; k < depth; k += kLanes, out += height * kLanes) {
        const Vec value = depth - k >= kLanes ? load(row + k) : load_part(row + k, depth - k);
        store(out, scale == nullptr ? value : mul(value, factor));
      }
    }
  }
}

// How inputs meet weights: here fp32 inputs, and weights widened in registers.
template <class T>
struct Product {
  using X = float;
  using W = T;
  using WVec = Vec;
  static constexpr int64_t kStep = kLanes;  // elements at a time

  static Vec load_x(const X* p) { return load(p); }
  static WVec load_w(const W* p) { return load(p); }
  static WVec load_w_part(const W* p, int64_t count) { return load_part(p, count); }
  static Vec add_product(Vec acc, Vec x, WVec w) { return fma(x, w, acc); }
};

inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

// Fetch the rows of B that the deltas of a strip of columns will read.
template <class T>
inline void prefetch_deltas(const RowDelta* delta, int64_t rows, int64_t first_col, int64_t end_col) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t m = 0; m < rows; ++m) {
    const RowDelta& d = delta[m];
    if (d.rank == 0 || (m > 0 && d.b == delta[m - 1].b)) continue;  // rows of one segment share B
    const int64_t rows_per_line = d.b_stride > 0 && d.b_stride < kLine ? kLine / d.b_stride : 1;
    for (int64_t n = first_col; n < end_col; n += rows_per_line) {
      const T* b = static_cast<const T*>(d.b) + n * d.b_stride;
      for (int64_t r = 0; r < d.rank; r += kLine) prefetch(b + r);
    }
  }
}

// One register tile: kRows packed rows by kCols rows of w, over `depth` elements; then the rows' deltas; then the lane sums.
// Meanwhile kAhead rows at `ahead` are fetched, a part of the strip of w that comes next.
template <class P, int kRows, int kCols, int kAhead>
void tile(const typename P::X* x, const typename P::W* w, const typename P::W* ahead, int64_t w_stride, int64_t depth,
          const RowDelta* delta, int64_t first_col, bool accumulate, float* c, int64_t c_stride) {
  using T = typename P::W;
  constexpr int kGroups = (kRows * kCols + kLanes - 1) / kLanes;
  Vec acc[kGroups * kLanes];
#pragma GCC unroll 64
  for (int i = 0; i < kGroups * kLanes; ++i) acc[i] = zero();
  int64_t k = 0;
  for (; k + P::kStep <= depth; k += P::kStep, x += kRows * P::kStep) {
    typename P::WVec wv[kCols];
#pragma GCC unroll 8
    for (int n = 0; n < kCols; ++n) {
      wv[n] = P::load_w(w + n * w_stride + k);
      if (n < kAhead) prefetch(ahead + n * w_stride + k);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const auto xv = P::load_x(x + m * P::kStep);
#pragma GCC unroll 8
      for (int n = 0; n < kCols; ++n) acc[m * kCols + n] = P::add_product(acc[m * kCols + n], xv, wv[n]);
    }
  }
  if (k < depth) {
#pragma GCC unroll 8
    for (int n = 0; n < kCols; ++n) {
      const auto wv = P::load_w_part(w + n * w_stride + k, depth - k);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) acc[m * kCols + n] = P::add_product(acc[m * kCols + n], P::load_x(x + m * P::kStep), wv);
    }
  }
  if (delta != nullptr) {
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const RowDelta& d = delta[m];
      const T* b = static_cast<const T*>(d.b) + first_col * d.b_stride;
      for (int64_t r = 0; r < d.rank; r += kLanes) {
        const Vec zv = load(d.z + r);
#pragma GCC unroll 8
        for (int n = 0; n < kCols; ++n) {
          const T* bn = b + n * d.b_stride + r;
          const Vec bv = d.rank - r >= kLanes ? load(bn) : load_part(bn, d.rank - r);
          acc[m * kCols + n] = fma(zv, bv, acc[m * kCols + n]);
        }
      }
    }
  }
  float sums[kGroups * kLanes];
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) store(sums + g * kLanes, lane_sums(acc + g * kLanes));
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kCols; ++n) {
      float& out = c[m * c_stride + n];
      out = accumulate ? out + sums[m * kCols + n] : sums[m * kCols + n];
    }
  }
}

template <class P>
using TileFunction = void (*)(const typename P::X*, const typename P::W*, const typename P::W*, int64_t, int64_t,
                              const RowDelta*, int64_t, bool, float*, int64_t);

template <class P, int kCols, int kAhead>
TileFunction<P> tile_of_height(int64_t rows) {
  static_assert(kTileRows <= 6, "add a case");
  switch (rows) {
    case 1:
      return tile<P, 1, kCols, kAhead>;
    case 2:
      return tile<P, 2, kCols, kAhead>;
    case 3:
      return tile<P, 3, kCols, kAhead>;
    case 4:
      return tile<P, 4, kCols, kAhead>;
    case 5:
      return tile<P, kTileRows < 5 ? 1 : 5, kCols, kAhead>;
    default:
      return tile<P, kTileRows < 6 ? 1 : 6, kCols, kAhead>;
  }
}

template <class P>
void gemm(const Gemm& g) {
  using T = typename P::W;
  // A strip of w waits for memory once, under its first tile. The strip after it is fetched meanwhile: by that tile, or in two
  // halves by the first two, which asks for no more bytes a cycle than the memory delivers.
  constexpr int kHalf = (kTileCols + 1) / 2;
  const int64_t padded = round_up(g.depth, P::kStep), tiles = num_tiles(g.rows);
  int64_t k = 0;
  do {  // once even for depth 0: the delta alone
    const int64_t block = g.depth - k < kDepthBlock ? g.depth - k : kDepthBlock;
    const bool is_last = k + block >= g.depth;
    const T* w = static_cast<const T*>(g.w) + k;
    const RowDelta* deltas = is_last ? g.delta : nullptr;
    const auto fetch_deltas = [&](int64_t n) {  // two strips ahead: a tile of a small depth is shorter than a miss
      if (deltas != nullptr) prefetch_deltas<T>(deltas, g.rows, n, n + kTileCols < g.cols ? n + kTileCols : g.cols);
    };
    fetch_deltas(0);
    fetch_deltas(kTileCols);
    for (int64_t n = 0; n < g.cols;) {
      const bool is_full = g.cols - n >= kTileCols;
      const T* strip = w + n * g.w_stride;
      const T* next = n + kTileCols < g.cols ? strip + kTileCols * g.w_stride : w + block;
      if (n + kTileCols >= g.cols && is_last) next = static_cast<const T*>(g.next_w);
      if (is_full) fetch_deltas(n + 2 * kTileCols);
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t m = tile_begin(g.rows, t), height = tile_begin(g.rows, t + 1) - m;
        TileFunction<P> run = tile_of_height<P, kTileCols, 0>(height);
        if (!is_full) {
          run = tile_of_height<P, 1, 0>(height);
        } else if (next != nullptr && t < 2) {
          run = tiles == 1 ? tile_of_height<P, kTileCols, kTileCols>(height) : tile_of_height<P, kTileCols, kHalf>(height);
        }
        const T* ahead = next == nullptr ? strip : next + t * kHalf * g.w_stride;
        const RowDelta* delta = deltas == nullptr ? nullptr : deltas + m;
        const typename P::X* x = static_cast<const typename P::X*>(g.x) + m * padded + k * height;
        run(x, strip, ahead, g.w_stride, block, delta, n, k > 0, g.c + m * g.c_stride + n, g.c_stride);
      }
      n += is_full ? kTileCols : 1;
    }
    k += kDepthBlock;
  } while (k < g.depth);
}

// exp to 2 ulp: 2^n from the exponent bits, the rest by a polynomial on [-ln2/2, ln2/2]. NaN stays NaN; saturates at e^±88.3.
inline float exp_of(float x) {
  x = x > 88.3f ? 88.3f : x;
  x = x < -88.3f ? -88.3f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer part lands in the low bits
  const float n = shifted - 12582912.0f;
  float r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits;
  __builtin_memcpy(&bits, &shifted, 4);
  bits = static_cast<int32_t>(static_cast<uint32_t>(bits + 127) << 23);
  float power;
  __builtin_memcpy(&power, &bits, 4);
  return p * power;
}

// Past the saturation of exp_of the product is x times zero, not x times its smallest value: x may be huge.
inline float times_sigmoid(float x, float at) { return at < -88.3f ? 0.0f * x : x / (1.0f + exp_of(-at)); }

template <Activation kKind>
inline float activation_of(float x) {
  switch (kKind) {
    case Activation::kSilu:
      return times_sigmoid(x, x);
    case Activation::kGelu:
      return 0.5f * x * (1.0f + __builtin_erff(x * 0.70710678f));
    case Activation::kGeluTanh:  // (1 + tanh u) / 2 = sigmoid(2 u), which does not cancel for u < 0
      return times_sigmoid(x, 1.59576912f * (x + 0.044715f * x * x * x));
    default: {
      const float positive = x < 0.0f ? 0.0f : x;
      return positive * positive;
    }
  }
}

template <Activation kKind>
void activate_kind(const ActivationSpec& spec, const float* gate, const float* up, int64_t count, float* out) {
  const float alpha = spec.alpha, limit = spec.limit;
  if (!spec.gated) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) out[i] = activation_of<kKind>(gate[i]);
    return;
  }
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    float g = gate[i], u = up[i];
    g = g > limit ? limit : g;
    u = u > limit ? limit : u < -limit ? -limit : u;
    out[i] = kKind == Activation::kSwigluOai ? (u + 1.0f) * times_sigmoid(g, alpha * g) : activation_of<kKind>(g) * u;
  }
}

[[maybe_unused]] void activate(const ActivationSpec& spec, const float* gate, const float* up, int64_t count, float* out) {
  switch (spec.kind) {
    case Activation::kSilu:
      return activate_kind<Activation::kSilu>(spec, gate, up, count, out);
    case Activation::kGelu:
      return activate_kind<Activation::kGelu>(spec, gate, up, count, out);
    case Activation::kGeluTanh:
      return activate_kind<Activation::kGeluTanh>(spec, gate, up, count, out);
    case Activation::kRelu2:
      return activate_kind<Activation::kRelu2>(spec, gate, up, count, out);
    case Activation::kSwigluOai:
      return activate_kind<Activation::kSwigluOai>(spec, gate, up, count, out);
  }
}

template <class T>
void add_scaled(void* out, const float* delta, float scale, int64_t count) {
  T* o = static_cast<T*>(out);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(o + i, fma(broadcast(scale), load(delta + i), load(o + i)));
  for (; i < count; ++i) from_float(__builtin_fmaf(scale, delta[i], to_float(o[i])), o[i]);
}

template <class T>
void round_scaled(void* out, const float* value, float scale, int64_t count) {
  T* o = static_cast<T*>(out);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(o + i, mul(broadcast(scale), load(value + i)));
  for (; i < count; ++i) from_float(scale * value[i], o[i]);
}

[[maybe_unused]] constexpr Simd make(const char* name) {
  return {name,
          {pack<float>, pack<BFloat16>, pack<Float16>},
          {gemm<Product<float>>, gemm<Product<BFloat16>>, gemm<Product<Float16>>},
          activate,
          {add_scaled<float>, add_scaled<BFloat16>, add_scaled<Float16>},
          {round_scaled<float>, round_scaled<BFloat16>, round_scaled<Float16>},
          nullptr,
          nullptr};
}
