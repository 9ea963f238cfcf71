"""Runs the CUDA kernels without a GPU: their sources, compiled for the host, with threads as fibers."""
