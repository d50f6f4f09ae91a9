"""Recordings of all that a pair writes to a prompt, and their replay on engines of any shape."""
