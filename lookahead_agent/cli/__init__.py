"""The command line: `lookahead-agent ask | agent | bench | plan | …`."""

from lookahead_agent.cli.app import main

__all__ = ["main"]
