"""Cases, tolerances and timing shared by tests, benchmarks and the tuner."""
