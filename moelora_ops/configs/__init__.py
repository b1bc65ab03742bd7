"""Tuned kernel configurations, one JSON file per op, shape and device; none ships yet: the rules of kernels/config.py apply."""
