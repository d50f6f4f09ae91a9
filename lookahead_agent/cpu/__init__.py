"""vLLM on CPUs: int8 and VNNI kernels, sampling, norms and activations, the output layer, and which cores run them."""
