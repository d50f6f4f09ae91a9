"""Measuring: replies of several policies to the same problems."""
