"""Recordings of everything that a pair writes to a prompt."""
