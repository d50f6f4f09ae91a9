"""The models that a request's policy needs and that do not run: a client's option never starts them."""

from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.errors import PolicyError
from lookahead_agent.policy import VerifierPolicy, as_policy
from lookahead_agent.verifiers.judge import EngineJudge


class RunningModels:
    """The models of a server's engines, by role."""

    def __init__(self, llm: ChatLookahead) -> None:
        self._llm = llm
        own = (as_policy(policy).with_depth(llm.depth) for policy in (llm.policy, *llm.policies.values()))
        self._started = frozenset().union(*map(_roles, own))  # by the server itself, for its own policies

    def check(self, policy: VerifierPolicy) -> None:
        """Raise PolicyError if a policy needs models that do not run."""
        missing = _roles(policy) - self._started - self._running()
        if missing:
            models = " and ".join(sorted(missing))
            raise PolicyError(
                f"the policy {policy.name!r} needs the {models} model, which does not run here: the server's owner can "
                f"start it with --policy {policy.name}, or allow requests to start models with --start-models"
            )

    def _running(self) -> frozenset[str]:
        engines, runtime = self._llm.backend.running, self._llm.backend.runtime
        roles = set(runtime.spec.remote) if runtime is not None else set()
        models = runtime.models if runtime is not None else None
        has_own_judge = models is not None and models.judge not in (None, models.target, models.draft)
        if engines is None:  # they are being started again
            return frozenset(roles if has_own_judge else roles | {"judge"})
        if engines.draft is None:
            return frozenset({"judge", "embedding"})  # the target writes alone and asks no other model
        waits_for_judge = isinstance(engines.judge, EngineJudge) and engines.judge.engine is engines.target
        if engines.judge is not None and not (has_own_judge and waits_for_judge):
            roles.add("judge")
        if engines.embedder is not None:
            roles.add("embedding")
        return frozenset(roles | {"draft"})


def _roles(policy: VerifierPolicy) -> frozenset[str]:
    """Return the roles of the models that a policy cannot do without, beside the target."""
    needs = {"draft": policy.forces_speculation, "judge": policy.asks_judge, "embedding": policy.embeds}
    return frozenset(role for role, is_needed in needs.items() if is_needed)
