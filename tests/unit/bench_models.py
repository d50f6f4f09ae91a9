"""Benchmarks on a model that follows a script."""

from __future__ import annotations

from lookahead_agent import ChatLookahead
from lookahead_agent.bench.config import BenchConfig, TaskConfig
from lookahead_agent.bench.configurations import Configuration, template_policies
from tests.unit.chat import scripted_chat

REPLY = "Let me see.\n\nThere are several.\n\nAnswer: 14"


def scripted_arm(config: BenchConfig, task: TaskConfig, configuration: Configuration) -> ChatLookahead:
    """The chat model of an arm that says the same to everything; the first problem of the package's set is right."""
    default, nodes = configuration.policies(template_policies(task))
    return scripted_chat(REPLY, policy=default, policies=nodes, streaming=True, return_token_ids=True, temperature=0)
