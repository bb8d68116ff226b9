"""Benchmarks: ratios measured in one run on the real engine with the real small model; see `make help`."""
