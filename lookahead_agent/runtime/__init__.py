"""Selects a chat model's engines for the machine, starts them, and shares them among replies."""
