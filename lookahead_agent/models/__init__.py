"""Which models there are and how they get onto this machine."""
