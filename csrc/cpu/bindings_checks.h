// Whether a call is surely one that the checks of meta/ let through. False is no refusal: then Python's check decides, and
// words the error (`ask_python`). So the rules stand here a second time, but not the messages, and a rule that is too strict
// here costs time only.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <initializer_list>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

// An exception that sets Python's own error where it leaves pybind11, which catches this base class by its name; for everybody
// else it is a std::runtime_error.
namespace pybind11 {
class __attribute__((visibility("default"))) builtin_exception : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  virtual void set_error() const = 0;
};
}  // namespace pybind11

namespace moelora {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ValueError or TypeError.
class Refusal final : public pybind11::builtin_exception {
 public:
  Refusal(bool is_type_error, const std::string& text) : builtin_exception(text), is_type_error_(is_type_error) {}
  void set_error() const override {  // with the interpreter's lock; its symbols are there if somebody calls this
    const auto set = reinterpret_cast<void (*)(void*, const char*)>(dlsym(RTLD_DEFAULT, "PyErr_SetString"));
    auto* const type = static_cast<void**>(dlsym(RTLD_DEFAULT, is_type_error_ ? "PyExc_TypeError" : "PyExc_ValueError"));
    if (set != nullptr && type != nullptr) set(*type, what());
  }

 private:
  bool is_type_error_;
};

// Takes the string over and frees it; `to<std::string>` of torch 2.13's headers leaks one with every call.
inline std::string text_of(StringHandle handle) {
  const char* data = nullptr;
  size_t length = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  std::string text(data, length);
  STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

// Returns if Python's check lets these arguments through, else throws its error. `op` is "moelora_native::objection_<name>",
// which returns the type's first letter and the text, or nothing.
template <class... Arguments>
void ask_python(const char* op, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  if (torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS) {
    throw std::invalid_argument(std::string(op) + ": no Python here to say why these arguments do not fit the op");
  }
  const std::string text = text_of(torch::stable::detail::to<StringHandle>(stack[0]));
  if (!text.empty()) throw Refusal(text[0] == 'T', text.substr(1));
}

constexpr int64_t kAny = -1;   // a size that is not compared
constexpr int64_t kNone = -2;  // no tensor's size
constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxKeys = int64_t{1} << 30;
using Types = std::initializer_list<ScalarType>;
using Sizes = std::initializer_list<int64_t>;
constexpr Types kIdTypes = {ScalarType::Int, ScalarType::Long}, kFlagTypes = {ScalarType::Int, ScalarType::Bool};
constexpr Types kComputeTypes = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};

// Sizes of a tensor without elements, or with a stride of 0, can have a product that wraps around to one that fits.
inline int64_t product(int64_t a, int64_t b) {
  int64_t result;
  return __builtin_mul_overflow(a, b, &result) ? kNone : result;
}

// A CPU tensor (Python's None comes as one that is not defined) of one of these types with these sizes.
inline bool is(const Tensor& tensor, Types types, Sizes sizes) {
  if (!tensor.defined() || !tensor.is_cpu() || tensor.dim() != static_cast<int64_t>(sizes.size())) return false;
  const ScalarType type = tensor.scalar_type();
  bool known = false;
  for (ScalarType t : types) known |= t == type;
  if (!known) return false;
  const auto have = tensor.sizes();
  size_t dim = 0;
  for (int64_t want : sizes) {
    if (have[dim++] != want && want != kAny) return false;
  }
  return true;
}

inline bool is(const OptionalTensor& tensor, Types types, Sizes sizes) { return !tensor || is(*tensor, types, sizes); }

// As `is`, and rows are contiguous.
inline bool has_rows(const Tensor& tensor, Types types, Sizes sizes) {
  if (!is(tensor, types, sizes)) return false;
  const int64_t last = tensor.dim() - 1;
  return tensor.stride(last) == 1 || tensor.size(last) <= 1;
}

inline bool has_rows(const OptionalTensor& tensor, Types types, Sizes sizes) {
  return !tensor || has_rows(*tensor, types, sizes);
}

// [L, E or 1, ...] with contiguous rows.
inline bool is_stacked(const Tensor& tensor, Types type, int64_t slots, int64_t experts, int64_t rows, int64_t columns) {
  return has_rows(tensor, type, {slots, kAny, rows, columns}) && (tensor.size(1) == experts || tensor.size(1) == 1);
}

inline bool are_flags(const OptionalTensor& flags, int64_t least) {
  return is(flags, kFlagTypes, {kAny}) && (!flags || flags->size(0) >= least);
}

inline bool fits_align(const Tensor& topk_ids, const Tensor& token_lora_mapping, int64_t num_experts, int64_t block_size,
                       int64_t max_loras, const OptionalTensor& adapter_enabled, const OptionalTensor& expert_map) {
  if (num_experts < 1 || num_experts > kInt32Max || block_size < 1 || block_size > kInt32Max) return false;
  if (max_loras < 0 || max_loras > kMaxKeys / num_experts || !is(topk_ids, kIdTypes, {kAny, kAny})) return false;
  const int64_t num_tokens = topk_ids.size(0), top_k = topk_ids.size(1), num_pairs = num_tokens * top_k;
  if (top_k > num_experts || num_pairs > kInt32Max || !is(token_lora_mapping, kIdTypes, {num_tokens})) return false;
  const int64_t by_block = num_pairs * block_size;
  const int64_t by_group = (num_pairs + num_experts * (block_size - 1) + block_size - 1) / block_size * block_size;
  if (by_block > kInt32Max && by_group > kInt32Max) return false;
  return are_flags(adapter_enabled, max_loras) && is(expert_map, kIdTypes, {num_experts});
}

// Rows are contiguous and no element has two addresses.
inline bool is_writable(const Tensor& output) {
  const int64_t num_tokens = output.size(0), top_k = output.size(1), width = output.size(2);
  const int64_t by_token = output.stride(0), by_choice = output.stride(1);
  if ((num_tokens > 1 && by_token < width) || (top_k > 1 && by_choice < width)) return false;
  if (num_tokens <= 1 || top_k <= 1) return true;
  if (width == 0) return false;  // strides of no elements: the products below may overflow
  return by_token >= (top_k - 1) * by_choice + width || by_choice >= (num_tokens - 1) * by_token + width;
}

inline bool fits_delta(const Tensor& output, const Tensor& hidden_states, const std::vector<Tensor>& lora_a,
                       const std::vector<Tensor>& lora_b, const Tensor& topk_weights, const Tensor& sorted_token_ids,
                       const Tensor& expert_ids, const Tensor& num_tokens_post_padded, const OptionalTensor& lora_ranks,
                       int64_t offset) {
  if (!has_rows(output, kComputeTypes, {kAny, kAny, kAny}) || !is_writable(output)) return false;
  const int64_t num_tokens = output.size(0), top_k = output.size(1), num_pairs = num_tokens * top_k;
  const Types type = {output.scalar_type()};
  if (num_pairs > kInt32Max || !has_rows(hidden_states, type, {kAny, kAny})) return false;
  if (hidden_states.size(0) != num_tokens && hidden_states.size(0) != num_pairs) return false;
  if (lora_a.empty() || lora_a.size() != lora_b.size()) return false;
  int64_t experts = 1;  // the first that is not shared
  for (const auto* stack : {&lora_a, &lora_b}) {
    for (const Tensor& t : *stack) {
      if (!is(t, type, {kAny, kAny, kAny, kAny})) return false;
      if (experts == 1) experts = t.size(1);
    }
  }
  const int64_t slots = lora_a[0].size(0), max_rank = lora_a[0].size(2), width = lora_b[0].size(2);
  const int64_t columns = product(static_cast<int64_t>(lora_b.size()), width);
  if (slots > kInt32Max || columns == kNone) return false;
  for (const Tensor& a : lora_a) {
    if (!is_stacked(a, type, slots, experts, max_rank, hidden_states.size(1))) return false;
  }
  for (const Tensor& b : lora_b) {
    if (!is_stacked(b, type, slots, experts, width, max_rank)) return false;
  }
  if (offset < 0 || offset > output.size(2) - columns) return false;
  const Types int32 = {ScalarType::Int};
  if (!is(topk_weights, {ScalarType::Float}, {num_tokens, top_k}) || !is(lora_ranks, int32, {slots})) return false;
  if (!is(sorted_token_ids, int32, {slots, kAny}) || !is(expert_ids, int32, {slots, kAny})) return false;
  const int64_t capacity = sorted_token_ids.size(1), blocks = expert_ids.size(1);
  if (blocks == 0 ? capacity != 0 : blocks > capacity || capacity % blocks != 0) return false;
  return is(num_tokens_post_padded, int32, {slots});
}

inline bool fits_experts(const Tensor& hidden_states, const Tensor& w13, const Tensor& w2, const Tensor& topk_weights,
                         const Tensor& topk_ids, const Tensor& token_lora_mapping, const OptionalTensor& lora_a13,
                         const OptionalTensor& lora_b13, const OptionalTensor& lora_a2, const OptionalTensor& lora_b2,
                         const OptionalTensor& lora_ranks, const OptionalTensor& adapter_enabled,
                         const OptionalTensor& w13_bias, const OptionalTensor& w2_bias, const OptionalTensor& expert_map,
                         bool needs_gate, bool gated, std::optional<double> swiglu_limit) {
  if ((needs_gate && !gated) || (swiglu_limit && !(*swiglu_limit > 0))) return false;
  if (!has_rows(hidden_states, kComputeTypes, {kAny, kAny})) return false;
  const Types type = {hidden_states.scalar_type()};
  const int64_t num_tokens = hidden_states.size(0), hidden = hidden_states.size(1), slices = gated ? 2 : 1;
  if (!has_rows(w2, type, {kAny, hidden, kAny})) return false;
  const int64_t experts = w2.size(0), intermediate = w2.size(2), rows = product(slices, intermediate);
  if (experts > kInt32Max) return false;
  if (!has_rows(w13, type, {experts, rows, hidden})) return false;
  if (!has_rows(w13_bias, type, {experts, rows}) || !has_rows(w2_bias, type, {experts, hidden})) return false;
  if (!is(topk_weights, {ScalarType::Float}, {num_tokens, kAny})) return false;
  const int64_t top_k = topk_weights.size(1);
  if (!is(topk_ids, kIdTypes, {num_tokens, top_k}) || !is(token_lora_mapping, kIdTypes, {num_tokens})) return false;
  if (!is(expert_map, kIdTypes, {kAny}) || top_k > (expert_map ? expert_map->size(0) : experts)) return false;
  if (num_tokens * top_k > kInt32Max) return false;
  if (lora_a13.has_value() != lora_b13.has_value() || lora_a2.has_value() != lora_b2.has_value()) return false;
  int64_t slots = kAny, max_rank = kAny;
  if (lora_b13) {
    if (!has_rows(*lora_b13, type, {kAny, experts, rows, kAny})) return false;
    slots = lora_b13->size(0), max_rank = lora_b13->size(3);
    if (!is_stacked(*lora_a13, type, slots, experts, product(slices, max_rank), hidden)) return false;
  }
  if (lora_b2) {
    if (!is_stacked(*lora_b2, type, slots, experts, hidden, max_rank)) return false;
    slots = lora_b2->size(0), max_rank = lora_b2->size(3);
    if (!has_rows(*lora_a2, type, {slots, experts, max_rank, intermediate})) return false;
  }
  if (!is(lora_ranks, {ScalarType::Int}, {slots})) return false;
  if (slots == kAny) slots = lora_ranks ? lora_ranks->size(0) : 0;
  return slots <= kInt32Max && are_flags(adapter_enabled, slots);
}

}  // namespace moelora
