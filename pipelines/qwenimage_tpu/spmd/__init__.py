"""The QwenImage transformer as one JAX program over a mesh of chips, on the same Pallas kernels."""
