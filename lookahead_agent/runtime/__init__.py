"""Which engines a chat model has: arranged for the machine, started, and shared by replies."""
