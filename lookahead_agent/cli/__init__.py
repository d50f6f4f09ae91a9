"""The command line: `lookahead-agent ask | agent | bench | estimate | …`."""

from lookahead_agent.cli.app import main as main
