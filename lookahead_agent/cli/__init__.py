"""The command line: `lookahead-agent ask | agent | compare | models`."""

from lookahead_agent.cli.app import main

__all__ = ["main"]
