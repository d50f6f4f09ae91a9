"""Certificates that bound a policy's risk, and the monitor that detects drift from their calibration."""
