"""Reads this machine's hardware, and chooses the fastest configuration of a pair of models on it."""
