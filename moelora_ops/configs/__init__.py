"""Tuned kernel configurations, one JSON file per stage, shape and device; without one the rules of kernels/config.py apply."""
