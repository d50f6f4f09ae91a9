"""The speedup of speculation: formulas, and the decoder in virtual time."""
