"""Predicts the fastest setting on this machine from measured costs, and measures it at exact acceptance rates."""
