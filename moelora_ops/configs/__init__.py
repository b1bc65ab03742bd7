"""Tuned kernel configurations, one JSON file per op, shape and device (docs/tuning.md); kernels/config.py has rules without."""
