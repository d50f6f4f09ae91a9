"""Decides whether drafting pays: which engines, which mode for each reply, and from which measured paces."""
