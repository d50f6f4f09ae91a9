"""Figures for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lookahead_agent.generation.backend import ChatReply

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """Counts what the server does; other nodes and policies than these, which clients choose, are "other"."""

    def __init__(self, nodes: frozenset[str], policies: frozenset[str]) -> None:
        self._nodes = nodes
        self._policies = policies
        self._registry = registry = CollectorRegistry()
        labels = ("policy", "node")

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"lookahead_{name}", text, (*labels, *more), registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"lookahead_{name}_seconds", text, labels, buckets=_SECONDS, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"lookahead_{name}", text, labels, registry=registry)

        self._replies = counter("replies", "Replies, by why they ended.", "finish_reason")
        self._steps = counter("steps", "Steps of replies, by who wrote them.", "source")
        self._tokens = counter("tokens", "Tokens that the engines generated, by fate.", "model", "fate")
        self._prompts = counter("prompt_tokens", "Tokens of prompts, by where they came from.", "model", "source")
        self._judged = counter("verifier_calls", "Draft steps that the verifier was asked about.")
        self._disabled = counter("speculation_disabled", "Replies whose speculation ended early.")
        self._failures = Counter("lookahead_refused", "Requests without a reply.", ("status",), registry=registry)
        self._seconds = histogram("reply", "Time to generate a reply.")
        self._prompt = histogram("prompt", "Time of a reply until the target's first token.")
        self._writing = histogram("writing", "Time of a reply after the target's first token.")
        self._first = histogram("first_text", "Time to the first text that is certain.")
        self._audited = gauge("audited_steps", "Steps accepted by a certificate, judged again, by outcome.", "outcome")
        self._tightened = gauge("tightened_policies", "Certificates given up: too many of their steps were disputed.")
        self.running = gauge("running", "Replies being generated.")
        self.waiting = gauge("waiting", "Replies that wait.")

    def count_reply(self, reply: ChatReply, seconds: float, first: float | None) -> None:
        """Count a reply that took so many seconds, and so many until its first text; None: it had none."""
        figures = reply.lookahead
        path, name = figures["path"], figures["policy"]
        node = "" if path is None else path if path in self._nodes else "other"
        # "balanced:depth=8" may be a client's own: one label for all changes of a policy.
        base = name.partition(":")[0]
        labels = (base if base in self._policies or name in self._policies else "other", node)
        self._replies.labels(*labels, reply.finish_reason).inc()
        self._steps.labels(*labels, "draft").inc(figures["accepted"])
        self._steps.labels(*labels, "target").inc(figures["steps"] - figures["accepted"])
        for model, token_counts in figures["tokens"].items():
            for fate, count in token_counts.items():
                self._tokens.labels(*labels, model, fate).inc(count)
        for model, prompt in figures["prompt_tokens"].items():
            cached = prompt["cached"] or 0
            self._prompts.labels(*labels, model, "cache").inc(cached)
            self._prompts.labels(*labels, model, "read").inc(prompt["total"] - cached)
        self._judged.labels(*labels).inc(figures["verifier_calls"])
        self._disabled.labels(*labels).inc(figures["speculation_disabled"] is not None)
        audit = figures["audit"]
        for outcome, count in (audit | {"agreed": audit["audited"] - audit["disputed"]}).items():
            if outcome in ("agreed", "disputed", "dropped"):
                self._audited.labels(outcome).set(count)
        self._tightened.set(audit["tightened"])
        self._seconds.labels(*labels).observe(seconds)
        self._prompt.labels(*labels).observe(figures["seconds"]["prompt"])
        self._writing.labels(*labels).observe(figures["seconds"]["writing"])
        if first is not None:
            self._first.labels(*labels).observe(first)

    def count_error(self, status: int) -> None:
        """Count a request without a reply."""
        self._failures.labels(str(status)).inc()

    def text(self) -> bytes:
        """All figures in Prometheus' format."""
        return generate_latest(self._registry)
