"""Triton kernels and their torch references, one file an operation."""
