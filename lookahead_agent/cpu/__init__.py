"""A plugin of vLLM for CPUs: int8 and VNNI kernels, sampling, norms and activations, the output layer.

It imports nothing else of this library. vLLM loads it in each of its processes by the entry point
`vllm.general_plugins` of `pyproject.toml`; see `plugin`.
"""
