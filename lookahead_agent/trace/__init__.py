"""The events of a run, recorded as they happen and shown as a page."""
