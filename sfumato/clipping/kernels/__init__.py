"""Kernels for GPUs. Each does what an expression in `layer_algebra` or `grams` does, but faster."""
