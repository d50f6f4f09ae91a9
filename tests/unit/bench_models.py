"""Scripted chat models for tests of the benchmark."""

from __future__ import annotations

from lookahead_agent import ChatLookahead
from lookahead_agent.bench.config import BenchConfig, TaskConfig, TaskConfiguration, template_policies
from tests.unit.chat import scripted_chat

REPLY = "Let me see.\n\nThere are several.\n\nAnswer: 14"


def scripted_configuration(
    config: BenchConfig, task: TaskConfig, configuration: TaskConfiguration, reply: str = REPLY
) -> ChatLookahead:
    """A chat model that always writes `reply`; the default is correct for the first packaged problem."""
    default, nodes = configuration.policies(template_policies(task))
    return scripted_chat(reply, policy=default, policies=nodes, streaming=True, return_token_ids=True, temperature=0)
