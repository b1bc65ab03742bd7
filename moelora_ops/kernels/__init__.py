"""Kernels by backend: `native` (compiled C++ and CUDA C++), `triton/` (one stage a file), and their configurations."""
