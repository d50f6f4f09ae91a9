"""Names under which vLLM knows what this package adds to it; importing them loads nothing else."""

INT8 = "lookahead_int8"
"""W8A8 with the output layer in int8 too: see `int8_head`."""
INT8_WEIGHTS = "lookahead_int8_weights"
"""Weights as integers, activations in floating point: see `int8_weights`."""
PROVIDER = "lookahead_cpu"
"""Provider of the operations in `operations`, for vLLM's `ir_op_priority`."""
