"""A draft model learns from its target's replies."""
