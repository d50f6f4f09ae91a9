"""Which mode, depth and width are best on this machine: what things cost here, and what theory makes of it."""
