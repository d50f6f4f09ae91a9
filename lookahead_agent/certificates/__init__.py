"""Certificates of the risk that a policy keeps."""
