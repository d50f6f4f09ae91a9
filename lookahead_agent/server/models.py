"""The models that a request's policy needs and that do not run: a client's option never starts them."""

from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.errors import PolicyError
from lookahead_agent.policy import VerifierPolicy, as_policy
from lookahead_agent.runtime.engine_set import EngineSet


class RunningModels:
    """The models of a server's engines."""

    def __init__(self, llm: ChatLookahead) -> None:
        self._llm = llm
        own = (as_policy(policy).with_depth(llm.depth) for policy in (llm.policy, *llm.policies.values()))
        # The server starts these itself, for its own policies, and the target.
        self._started = frozenset({"target"}).union(*map(_roles, own))

    def check(self, policy: VerifierPolicy) -> None:
        """Raise PolicyError if a request under this policy would start models, or its draft is missing."""
        backend = self._llm.backend
        if backend.runtime is not None:
            missing = frozenset(backend.runtime.models_to_start(policy))
        else:
            missing = _list_missing(backend.running, policy)
        if missing := missing - self._started:
            roles = ", ".join(sorted(missing))
            raise PolicyError(
                f"the policy {policy.name!r} needs models that do not run here ({roles}): the server's owner can start "
                f"them with --policy {policy.name}, or let requests start models with --start-models"
            )


def _roles(policy: VerifierPolicy) -> frozenset[str]:
    """Return the roles of the models that a policy needs beside the target."""
    needs = {"draft": policy.forces_speculation, "judge": policy.asks_judge, "embedding": policy.embeds}
    return frozenset(role for role, is_needed in needs.items() if is_needed)


def _list_missing(engines: EngineSet | None, policy: VerifierPolicy) -> frozenset[str]:
    """Return the roles that a policy needs and that the caller's engines lack; without a draft, the target is alone."""
    if engines is None or engines.draft is None:
        return _roles(policy) & {"draft"}
    present = {"draft": True, "judge": engines.judge is not None, "embedding": engines.embedder is not None}
    return frozenset(role for role in _roles(policy) if not present[role])
