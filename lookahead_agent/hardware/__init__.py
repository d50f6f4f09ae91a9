"""What this machine can do, measured before any model loads, and the fastest way to run a pair of models on it."""
