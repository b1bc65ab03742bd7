"""Benchmarks: values first, then time. Run from the repository root, for example `python -m benchmarks.cpu`."""
