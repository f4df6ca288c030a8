"""Ratios of what we add to what it stands on, each measured in one run: `make benchmarks`."""
