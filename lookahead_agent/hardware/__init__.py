"""Divides the memory of GPUs among engines, and checks what a pair of models needs on this machine."""
