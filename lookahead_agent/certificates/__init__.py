"""Certificates of the risk that a policy keeps, and a monitor of whether they still hold."""
