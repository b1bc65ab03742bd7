"""Cases, tolerances and timing shared by tests and benchmarks."""
