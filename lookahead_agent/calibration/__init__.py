"""Calibration of verifiers for a stated risk: pairs of steps, their outcomes, and thresholds."""
