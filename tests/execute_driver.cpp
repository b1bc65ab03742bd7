// A driver that writes down what it is asked to launch, in place of CUDA's, for tests/test_launch_list.py.
//
// A function handle points to {number of parameters, their sizes ...}. Each launch appends 64-bit words to the record:
// function, grid x y z, block x, shared bytes, stream, dependent, then for each parameter its bytes in whole words.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "route.h"

namespace {

std::vector<uint64_t> record;
int launch_error = 0;

CUresult launch(const CUlaunchConfig* config, CUfunction function, void** parameters, void**) {
  const auto* sizes = reinterpret_cast<const uint64_t*>(function);
  const bool dependent = config->numAttrs == 1 &&
                         config->attrs[0].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
                         config->attrs[0].value.programmaticStreamSerializationAllowed == 1;
  const uint64_t threads = uint64_t{config->blockDimX} * config->blockDimY * config->blockDimZ;
  record.insert(record.end(), {reinterpret_cast<uint64_t>(function), config->gridDimX, config->gridDimY, config->gridDimZ,
                               threads, config->sharedMemBytes, reinterpret_cast<uint64_t>(config->hStream), dependent});
  for (uint64_t i = 0; i < sizes[0]; ++i) {
    uint64_t words[16] = {};
    std::memcpy(words, parameters[i], sizes[i + 1]);
    record.insert(record.end(), words, words + (sizes[i + 1] + 7) / 8);
  }
  return static_cast<CUresult>(launch_error);
}

// The map holds the arguments: address, type, swizzle, fill, rank, sizes, strides, box.
CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* sizes,
                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if (reinterpret_cast<uint64_t>(map) % 64 != 0 || interleave != 0 || promotion != CU_TENSOR_MAP_L2_PROMOTION_L2_128B)
    return CUDA_ERROR_INVALID_VALUE;
  std::vector<uint64_t> words{reinterpret_cast<uint64_t>(address), static_cast<uint64_t>(type), static_cast<uint64_t>(swizzle),
                              static_cast<uint64_t>(fill), rank};
  words.insert(words.end(), sizes, sizes + rank);
  words.insert(words.end(), strides, strides + rank - 1);
  words.insert(words.end(), box, box + rank);
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (steps[i] != 1) return CUDA_ERROR_INVALID_VALUE;
  }
  if (words.size() > 16) return CUDA_ERROR_INVALID_VALUE;
  std::memset(map, 0, sizeof *map);
  std::memcpy(map, words.data(), words.size() * 8);
  return CUDA_SUCCESS;
}

CUresult current_context(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}

CUresult parameter(CUfunction function, size_t index, size_t* offset, size_t* size) {
  const auto* sizes = reinterpret_cast<const uint64_t*>(function);
  if (index >= sizes[0]) return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  *size = sizes[index + 1];
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *result = cudaDriverEntryPointSuccess;
  *function = nullptr;
  if (std::strcmp(name, "cuLaunchKernelEx") == 0) *function = reinterpret_cast<void*>(&launch);
  if (std::strcmp(name, "cuTensorMapEncodeTiled") == 0) *function = reinterpret_cast<void*>(&encode);
  if (std::strcmp(name, "cuCtxGetCurrent") == 0) *function = reinterpret_cast<void*>(&current_context);
  if (std::strcmp(name, "cuFuncGetParamInfo") == 0) *function = reinterpret_cast<void*>(&parameter);
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int) { return cudaSuccess; }

// Route's launch: a zero, the stream, then the fields of its arguments. No rank tiles: not served.
__attribute__((visibility("default"))) int moelora_route(const RouteArgs* args, void* stream) {
  if (args->rank_tiles == 0) return -1;
  record.insert(record.end(), {0, reinterpret_cast<uint64_t>(stream)});
  for (const void* pointer : {args->topk_ids, args->token_lora_mapping, args->adapter_enabled, args->expert_map,
                              static_cast<const void*>(args->lora_ranks), static_cast<const void*>(args->tables)})
    record.push_back(reinterpret_cast<uint64_t>(pointer));
  const int32_t* const numbers = &args->num_pairs;
  for (int i = 0; i < 12; ++i) record.push_back(static_cast<uint64_t>(int64_t{numbers[i]}));
  return 0;
}

// Sets the error of the next launches and forgets the record.
__attribute__((visibility("default"))) void forget(int error) {
  launch_error = error;
  record.clear();
}

__attribute__((visibility("default"))) uint64_t recorded(uint64_t* words, uint64_t most) {
  std::memcpy(words, record.data(), std::min<uint64_t>(most, record.size()) * 8);
  return record.size();
}

}  // extern "C"
