"""Which policy a call gets: the call's own, the configuration's, its LangGraph node's, or the model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from lookahead_agent.errors import PolicyError
from lookahead_agent.policy import PolicyLike, VerifierPolicy, as_policy

if TYPE_CHECKING:
    from langgraph.graph.state import CompiledStateGraph

POLICY_KEY = "lookahead_policy"
_CONFIGURED = f'config["configurable"]["{POLICY_KEY}"]'
"""Key of `config["configurable"]` that chooses a policy."""


@dataclass(frozen=True)
class NodePath:
    """Where in a graph a call is made.

    Attributes:
        names: Node names from the outermost graph inwards; empty outside a graph.
    """

    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> NodePath:
        """The path in the metadata that LangGraph gives to what runs in a node."""
        node = metadata.get("langgraph_node")
        if node is None:
            return cls()
        # "outer:id|inner:id"; a part without an id numbers the calls of one node.
        parts = str(metadata.get("langgraph_checkpoint_ns") or "").split("|")
        names = tuple(name for name, separator, _ in (part.rpartition(":") for part in parts) if separator)
        return cls(names if names and names[-1] == node else (node,))

    @classmethod
    def read(cls, text: str) -> NodePath:
        """The path written as "outer:inner"."""
        return cls(tuple(text.split(":")))

    @property
    def node(self) -> str | None:
        """The innermost node; None outside a graph."""
        return self.names[-1] if self.names else None

    def tails(self) -> Iterator[str]:
        """The ways to name it, longest first: "outer:inner", "inner"."""
        for start in range(len(self.names)):
            yield ":".join(self.names[start:])

    def __str__(self) -> str:
        return ":".join(self.names)


def is_pattern(key: str) -> bool:
    """Whether a key of `policies` has wildcards."""
    return any(character in key for character in "*?[")


def matching_key(keys: Sequence[str], path: NodePath) -> str | None:
    """The key of `policies` that a node's path matches; None if there is none.

    A name ("planner") matches that node in every graph, a path ("research:planner") that node in that subgraph, and a
    pattern ("plan*", "research:*") whatever it fits. The longest name or path goes first, then the first pattern.
    """
    tails = list(path.tails())
    for tail in tails:
        if tail in keys:
            return tail
    patterns = (key for key in keys if is_pattern(key))
    return next((key for key in patterns if any(fnmatchcase(tail, key) for tail in tails)), None)


def choose_policy(
    *,
    call: PolicyLike | None,
    configurable: PolicyLike | None,
    path: NodePath,
    policies: Mapping[str, PolicyLike],
    default: PolicyLike,
) -> VerifierPolicy:
    """Choose the policy of one call; its `explain` says which rule did.

    Args:
        call: Argument of the call.
        configurable: `config["configurable"]["lookahead_policy"]`.
        path: The LangGraph node that is running.
        policies: Policies by node name, path or pattern.
        default: The model's.

    Raises:
        PolicyError: The chosen policy does not exist.
    """
    where = f"in the node {str(path)!r}" if path.names else "outside a graph"
    if call is not None:
        chosen = as_policy(call)
        return chosen if chosen.rule == _CONFIGURED else chosen.with_selection_rule("the call's own argument")
    if configurable is not None:
        return as_policy(configurable).with_selection_rule(_CONFIGURED)
    key = matching_key(list(policies), path)
    if key is not None:
        return as_policy(policies[key]).with_selection_rule(f"policies[{key!r}], {where}")
    return as_policy(default).with_selection_rule(f"the model's own policy: nothing else chooses one {where}")


def with_configured(options: dict[str, Any], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of a call, with the policy that its configuration names if the call itself names none.

    LangChain hands a model nothing of the configuration's "configurable" outside a chain or a graph.

    Raises:
        PolicyError: The policy does not exist.
    """
    policy = ((config or {}).get("configurable") or {}).get(POLICY_KEY)
    if policy is None or options.get("policy") is not None:
        return options
    return {**options, "policy": as_policy(policy).with_selection_rule(_CONFIGURED)}


def check_policies(policies: Mapping[str, PolicyLike], graph: CompiledStateGraph[Any, Any, Any, Any]) -> None:
    """Check that every key of `policies` names a node of a compiled graph or of its subgraphs.

    Raises:
        PolicyError: One does not; the message lists the nodes.
    """
    paths = [NodePath(names) for names in _node_paths(graph)]
    for key in policies:
        if all(matching_key([key], path) is None for path in paths):
            known = ", ".join(sorted(str(path) for path in paths))
            raise PolicyError(f"policies[{key!r}] matches no node of this graph, which has {known}")


def _node_paths(graph: Any) -> Iterator[tuple[str, ...]]:
    """Paths of the nodes of a compiled graph and its subgraphs."""
    subgraphs = dict(graph.get_subgraphs(recurse=False))
    for name in graph.nodes:
        if name.startswith("__"):
            continue
        yield (name,)
        if name in subgraphs:
            for inner in _node_paths(subgraphs[name]):
                yield (name, *inner)
