"""Building blocks of models, on the kernels."""
