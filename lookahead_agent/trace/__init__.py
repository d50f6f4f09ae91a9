"""Records the events of a run and writes the trace page."""
