"""Diffusion models: training, sampling, and the search for copies of training images."""
