"""Kernels for GPUs. Each does what an expression in `contract` or `grams` does, only faster."""
