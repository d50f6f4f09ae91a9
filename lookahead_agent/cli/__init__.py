"""The command line: `lookahead-agent ask | agent | bench | plan | …`."""

from lookahead_agent.cli.app import main as main
