"""Measuring: timing, the machine's limits, whole passes by part, single kernels, batches. docs/bench.md explains it."""
