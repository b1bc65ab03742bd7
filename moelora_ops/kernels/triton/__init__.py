"""Triton kernels, one stage a file. Imported on first use on a GPU, so that machines without Triton never need it."""
