// Launches a list of compiled kernels in one call, from kernels/native.py through ctypes: no torch, no allocation, no state.
//
// A program is a sequence of 64-bit words that kernels/triton/_launch.py writes once; a call brings addresses of tensors.
//
//   program    launch ...
//   launch     function, grid x y z, threads of a block, bytes of shared memory, dependent, number of parameters, parameter ...
//   parameter  kValue, bits                     a scalar in the low bytes, or null
//              kAddress, index, offset          addresses[index] + offset
//              kTensorMap, index, offset, type, swizzle, fill, rank, sizes[rank], strides in bytes[rank - 1], box[rank]
//
// Sizes of a tensor map begin with the innermost dimension. Function 0 is route; its parameters are the fields of RouteArgs.
#include "route.h"

#include <cuda.h>
#include <cuda_runtime.h>

namespace {

constexpr int kNotServed = -1;
constexpr int kMaxParameters = 64;
constexpr int kMaxTensorMaps = 4;
constexpr int kRouteParameters = 18;

enum ParameterKind { kValue, kAddress, kTensorMap };

// The driver's functions, found at run time: the extension must load where there is no driver.
template <typename Function>
Function* driver_function(const char* name, [[maybe_unused]] unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(found) : nullptr;
}

struct Driver {
  decltype(cuLaunchKernelEx)* launch = driver_function<decltype(cuLaunchKernelEx)>("cuLaunchKernelEx", 12000);
  decltype(cuTensorMapEncodeTiled)* encode =
      driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
  decltype(cuCtxGetCurrent)* current_context = driver_function<decltype(cuCtxGetCurrent)>("cuCtxGetCurrent", 12000);
  CUresult (*parameter)(CUfunction, size_t, size_t*, size_t*) =
      driver_function<CUresult(CUfunction, size_t, size_t*, size_t*)>("cuFuncGetParamInfo", 12040);

  bool complete() const { return launch && encode && current_context && parameter; }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

// Threads that have not called the runtime yet have no context, which launches on the default stream need.
int ensure_context() {
  CUcontext context = nullptr;
  if (const CUresult error = driver().current_context(&context)) return error;
  if (context != nullptr) return 0;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  return cudaSetDevice(device);
}

// The parameters of one launch, where the driver copies them from.
struct Parameters {
  uint64_t values[kMaxParameters];
  CUtensorMap maps[kMaxTensorMaps];  // aligned to 64 bytes by its type
  void* pointers[kMaxParameters];
};

// Moves `word` past one tensor map.
int read_map(const int64_t*& word, const uint64_t* addresses, CUtensorMap* map) {
  const uint64_t address = addresses[word[0]] + word[1];
  const int64_t type = word[2], swizzle = word[3], fill = word[4];
  const uint32_t rank = static_cast<uint32_t>(word[5]);
  word += 6;
  uint64_t sizes[5], strides[5];
  uint32_t box[5], steps[5] = {1, 1, 1, 1, 1};
  if (rank < 1 || rank > 5) return CUDA_ERROR_INVALID_VALUE;
  for (uint32_t i = 0; i < rank; ++i) sizes[i] = *word++;
  for (uint32_t i = 0; i + 1 < rank; ++i) strides[i] = *word++;
  for (uint32_t i = 0; i < rank; ++i) box[i] = static_cast<uint32_t>(*word++);
  return driver().encode(map, static_cast<CUtensorMapDataType>(type), rank, reinterpret_cast<void*>(address), sizes, strides,
                         box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(swizzle),
                         CU_TENSOR_MAP_L2_PROMOTION_L2_128B, static_cast<CUtensorMapFloatOOBfill>(fill));
}

// Moves `word` past `count` parameters.
int read_parameters(const int64_t*& word, int64_t count, const uint64_t* addresses, Parameters& parameters) {
  int maps = 0;
  if (count > kMaxParameters) return CUDA_ERROR_INVALID_VALUE;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t kind = *word++;
    parameters.pointers[i] = &parameters.values[i];
    if (kind == kValue) {
      parameters.values[i] = *word++;
    } else if (kind == kAddress) {
      parameters.values[i] = addresses[word[0]] + word[1];
      word += 2;
    } else {
      if (maps == kMaxTensorMaps) return CUDA_ERROR_INVALID_VALUE;
      parameters.pointers[i] = &parameters.maps[maps];
      if (const int error = read_map(word, addresses, &parameters.maps[maps++])) return error;
    }
  }
  return 0;
}

int launch_route(const uint64_t* values, int64_t count, void* stream) {
  if (count != kRouteParameters) return CUDA_ERROR_INVALID_VALUE;
  const auto pointer = [values](int i) { return reinterpret_cast<void*>(values[i]); };
  const auto number = [values](int i) { return static_cast<int32_t>(values[i]); };
  const RouteArgs args{pointer(0),  pointer(1),  pointer(2),  pointer(3),  static_cast<int32_t*>(pointer(4)),
                       static_cast<int32_t*>(pointer(5)),     number(6),   number(7),   number(8),
                       number(9),   number(10),  number(11),  number(12),  number(13),  number(14),
                       number(15),  number(16),  number(17)};
  return moelora_route(&args, stream);
}

}  // namespace

// Launches every kernel of the program on `stream` of the current device. Returns 0, the first error (a CUresult or
// cudaError_t, whose numbers agree), or -1 where the driver is too old or route does not serve this device or these sizes:
// nothing is launched then, as route comes first.
extern "C" __attribute__((visibility("default"))) int moelora_execute(const int64_t* program, int64_t num_words,
                                                                      const uint64_t* addresses, void* stream) {
  if (!driver().complete()) return kNotServed;
  if (const int error = ensure_context()) return error;
  const int64_t* const end = program + num_words;
  for (const int64_t* word = program; word < end;) {
    const int64_t *const header = word, function = header[0], count = header[7];
    word += 8;
    Parameters parameters;
    if (const int error = read_parameters(word, count, addresses, parameters)) return error;
    if (function == 0) {
      if (const int error = launch_route(parameters.values, count, stream)) return error;
      continue;
    }
    CUlaunchAttribute dependent{};
    dependent.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    dependent.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config{};
    config.gridDimX = static_cast<unsigned>(header[1]);
    config.gridDimY = static_cast<unsigned>(header[2]);
    config.gridDimZ = static_cast<unsigned>(header[3]);
    config.blockDimX = static_cast<unsigned>(header[4]);
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = static_cast<unsigned>(header[5]);
    config.hStream = static_cast<CUstream>(stream);
    config.attrs = &dependent;
    config.numAttrs = header[6] != 0 ? 1 : 0;
    const CUresult error = driver().launch(&config, reinterpret_cast<CUfunction>(function), parameters.pointers, nullptr);
    if (error != CUDA_SUCCESS) return error;
  }
  return 0;
}

// Whether a kernel has exactly `count` parameters of these sizes: 1 or 0, or -1 where the driver cannot tell.
extern "C" __attribute__((visibility("default"))) int moelora_has_parameters(void* function, const uint64_t* sizes,
                                                                             int64_t count) {
  if (!driver().complete()) return kNotServed;
  if (const int error = ensure_context()) return error < 0 ? error : kNotServed;
  const auto kernel = static_cast<CUfunction>(function);
  size_t offset = 0, size = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (driver().parameter(kernel, static_cast<size_t>(i), &offset, &size) != CUDA_SUCCESS || size != sizes[i]) return 0;
  }
  return driver().parameter(kernel, static_cast<size_t>(count), &offset, &size) == CUDA_ERROR_INVALID_VALUE;
}
