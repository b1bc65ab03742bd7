// Host side of the one-launch sorts: what the device offers, how the pairs are shared, the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "sort.cuh"

namespace moelora {

constexpr size_t kSharedByDefault = 48 * 1024;

// An error that the caller is told of is not left behind for the next one who asks the runtime.
inline cudaError_t returned(cudaError_t error) { return error == cudaSuccess ? error : cudaGetLastError(); }

constexpr int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// The current device; `shared` are the bytes of shared memory that a CTA may use, 0 where there are no clusters.
struct Device {
  int index;
  int shared;
};

inline Device current_device() {
  static std::atomic<int> known[64];  // bytes + 1: a property of the device, asked once
  Device device{0, 0};
  int major = 0;
  if (cudaGetDevice(&device.index) != cudaSuccess || device.index >= 64) return device;
  if (const int found = known[device.index].load(std::memory_order_relaxed)) return {device.index, found - 1};
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index) != cudaSuccess) return device;
  if (major >= 9) cudaDeviceGetAttribute(&device.shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.index);
  known[device.index].store(device.shared + 1, std::memory_order_relaxed);
  return device;
}

// The largest cluster of a kernel: more than kCtas where the device has room for them whatever shared memory each takes.
template <auto kernel>
int max_ctas(const Device& device) {
  static std::atomic<int> known[64];  // a property of the device, asked once
  if (const int found = known[device.index].load(std::memory_order_relaxed)) return found;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kMaxCtas, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kMaxCtas);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(device.shared);
  config.attrs = &cluster;
  config.numAttrs = 1;
  int clusters = 0;
  const bool fits = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
                    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared) == cudaSuccess &&
                    cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess && clusters > 0;
  if (!fits) cudaGetLastError();  // not an error of the call
  const int found = fits ? kMaxCtas : kCtas;
  known[device.index].store(found, std::memory_order_relaxed);
  return found;
}

// Of the plans that fit the one with the fewest rounds, then the most CTAs, but more than kCtas only for fewer rounds;
// size(plan) are the bytes it needs. Returns its bytes, 0 where none fits.
template <typename Size>
size_t plan_sort(const Device& device, int64_t num_pairs, int64_t num_keys, int most_ctas, const Size& size, SortPlan* best) {
  size_t bytes = 0;
  if (num_keys > device.shared) return 0;
  for (int ctas = most_ctas; ctas >= 1; ctas /= 2) {
    SortPlan plan{ctas, 1, 0, static_cast<int>(ceil_div(num_keys, 8) * 8), static_cast<int>(num_keys)};
    const int64_t row = plan.stride * static_cast<int64_t>(sizeof(uint16_t));
    const int64_t left = device.shared - static_cast<int64_t>(size(plan));
    if (left < 0) continue;
    plan.warps = static_cast<int>(std::min({int64_t{kWarps}, 1 + left / row, ceil_div(num_pairs, 32 * ctas)}));
    plan.chunk = static_cast<int>(ceil_div(ceil_div(num_pairs, ctas * plan.warps), 32) * 32);
    if (plan.chunk > kMaxChunk || std::min<int64_t>(num_pairs, int64_t{plan.warps} * plan.chunk) > kMaxPairsOfCta) continue;
    if (bytes == 0 || plan.chunk < best->chunk || (plan.chunk == best->chunk && best->ctas > kCtas)) {
      *best = plan, bytes = size(plan);
    }
  }
  return bytes;
}

// A cluster of `ctas` CTAs. `dependent`: it may start before the kernel before it ends, for which it waits.
template <auto kernel, typename Problem>
cudaError_t launch(const Device& device, const Problem& problem, int ctas, int threads, size_t shared, bool dependent,
                   cudaStream_t stream) {
  static std::atomic<uint64_t> allowed;  // bit per device: the kernel may use all of its shared memory
  const uint64_t bit = uint64_t{1} << device.index;
  if (shared > kSharedByDefault && (allowed.load(std::memory_order_relaxed) & bit) == 0) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared);
    if (error != cudaSuccess) return returned(error);
    allowed.fetch_or(bit, std::memory_order_relaxed);
  }
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(ctas), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = dependent ? 2 : 1;
  return returned(cudaLaunchKernelEx(&config, kernel, problem));
}

}  // namespace moelora
