"""Figures for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lookahead_agent.server.admission import Admission

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """Counts what the server does.

    Args:
        admission: Knows how many replies are generated, and how many wait.
        nodes: Node names that may be labels; others are "other", for clients choose them.
        policies: Names of policies that may be, in the same way.
    """

    def __init__(self, admission: Admission, nodes: frozenset[str], policies: frozenset[str]) -> None:
        self._nodes = nodes
        self._policies = policies
        self._registry = CollectorRegistry()
        labels = ("policy", "node")

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"lookahead_{name}", text, (*labels, *more), registry=self._registry)

        self._replies = counter("replies", "Replies, by why they ended.", "finish_reason")
        self._failures = Counter("lookahead_refused", "Requests without a reply.", ("status",), registry=self._registry)
        self._steps = counter("steps", "Steps of replies, by who wrote them.", "source")
        self._tokens = counter("tokens", "Tokens that the engines generated, by fate.", "model", "fate")
        self._judged = counter("verifier_calls", "Draft steps that the verifier was asked about.")
        self._off = counter("speculation_disabled", "Replies whose speculation ended early.")
        self._seconds = Histogram(
            "lookahead_reply_seconds", "Time to write a reply.", labels, buckets=_SECONDS, registry=self._registry
        )
        self._first = Histogram(
            "lookahead_first_text_seconds",
            "Time to the first text that is certain.",
            labels,
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._audited = Gauge(
            "lookahead_audited_steps",
            "Steps accepted by a certificate that were looked at again since the engines were started, by outcome.",
            ("outcome",),
            registry=self._registry,
        )
        self._tightened = Gauge(
            "lookahead_tightened_policies",
            "Certificates given up since then, for too many of their steps were disputed.",
            registry=self._registry,
        )
        Gauge("lookahead_running", "Replies being written.", registry=self._registry).set_function(
            lambda: admission.running
        )
        Gauge("lookahead_waiting", "Replies that wait.", registry=self._registry).set_function(
            lambda: admission.waiting
        )

    def written(self, metadata: dict[str, Any], seconds: float, first: float | None) -> None:
        """Count a reply.

        Args:
            metadata: The message's `response_metadata`.
            seconds: How long it took.
            first: When its first text came, in seconds; None: it had none.
        """
        figures = metadata["lookahead"]
        labels = (self._policy(figures["policy"]), self._node(figures["path"]))
        self._replies.labels(*labels, metadata["finish_reason"]).inc()
        self._steps.labels(*labels, "draft").inc(figures["accepted"])
        self._steps.labels(*labels, "target").inc(figures["steps"] - figures["accepted"])
        for model, token_counts in figures["tokens"].items():
            for fate, count in token_counts.items():
                self._tokens.labels(*labels, model, fate).inc(count)
        self._judged.labels(*labels).inc(figures["verifier_calls"])
        self._off.labels(*labels).inc(figures["speculation_disabled"] is not None)
        audit = figures["audit"]
        self._audited.labels("agreed").set(audit["audited"] - audit["disputed"])
        self._audited.labels("disputed").set(audit["disputed"])
        self._audited.labels("dropped").set(audit["dropped"])
        self._tightened.set(audit["tightened"])
        self._seconds.labels(*labels).observe(seconds)
        if first is not None:
            self._first.labels(*labels).observe(first)

    def refused(self, status: int) -> None:
        """Count a request without a reply."""
        self._failures.labels(str(status)).inc()

    def text(self) -> bytes:
        """All figures in Prometheus' format."""
        return generate_latest(self._registry)

    def _policy(self, name: str) -> str:
        # "balanced:depth=8" may be a client's own: one label for all changes of a policy.
        base = name.partition(":")[0]
        return base if base in self._policies or name in self._policies else "other"

    def _node(self, path: str | None) -> str:
        if path is None:
            return ""
        return path if path in self._nodes else "other"
