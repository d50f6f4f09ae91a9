"""Versions of what is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of(distribution: str) -> str | None:
    """The version of a Python distribution; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
