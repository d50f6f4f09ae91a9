"""Benchmarks: replies of several configurations to the same problems."""
