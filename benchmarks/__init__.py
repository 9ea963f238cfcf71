"""Benchmarks of torchsparse_rec beside its peers: ``python -m benchmarks --help``."""
