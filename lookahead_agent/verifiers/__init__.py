"""Decide whether a draft step may replace the target's."""
