"""Which risk a policy keeps: certificates, and whether they still hold."""
