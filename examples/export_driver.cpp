// Runs a model package without Python and compares with outputs that Python has written:
//
//     export_driver PACKAGE CASES LIBRARY...
//
// PACKAGE comes from AOTInductor, CASES from torch.save: a list of [inputs, outputs], lists of tensors. LIBRARYs are loaded
// first: moelora_ops' _C_schemas and _C_cpu. docs/export.md has the commands.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

namespace {

std::vector<at::Tensor> tensors(const c10::IValue& list) {
  std::vector<at::Tensor> found;
  for (const c10::IValue& value : list.toListRef()) found.push_back(value.toTensor());
  return found;
}

int run(const char* package, const char* cases) {
  std::ifstream file(cases, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  torch::inductor::AOTIModelPackageLoader model(package);
  int wrong = 0, count = 0;
  const c10::IValue list = torch::jit::pickle_load(bytes);
  for (const c10::IValue& item : list.toListRef()) {
    const auto inputs = tensors(item.toListRef()[0]), want = tensors(item.toListRef()[1]);
    const auto got = model.run(inputs);
    bool equal = got.size() == want.size();
    for (size_t i = 0; equal && i < got.size(); ++i) equal = got[i].equal(want[i]);
    std::cout << "case " << count++ << ", " << inputs[0].size(0) << " tokens: " << (equal ? "equal" : "DIFFERENT") << "\n";
    wrong += !equal;
  }
  return wrong == 0 && count > 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: " << argv[0] << " PACKAGE CASES LIBRARY...\n";
    return 2;
  }
  for (int i = 3; i < argc; ++i) {
    if (dlopen(argv[i], RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      std::cerr << dlerror() << "\n";
      return 2;
    }
  }
  try {
    return run(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
