"""`lookahead-agent bench overhead`: the decoder's own CPU time."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from lookahead_agent.bench.overhead import measure
from lookahead_agent.cli import options
from lookahead_agent.cli.terminal import Terminal, as_rich


def overhead(
    requests: Annotated[str, typer.Option("--requests", help="Replies at once, such as 1,32.")] = "1,32",
    tokens: Annotated[int, typer.Option("--tokens", min=160, help="Of all replies together.")] = 32_000,
    step_tokens: Annotated[int, typer.Option("--step-tokens", min=2, help="Of a step.")] = 16,
    rejected: Annotated[
        float, typer.Option("--rejected", min=0, max=0.5, help="Share of draft steps that the verifier rejects.")
    ] = 0.25,
    depth: Annotated[int, typer.Option("--depth", min=0, max=16, help="Steps ahead (γ); 0: the target alone.")] = 4,
    pass_ms: Annotated[
        float, typer.Option("--pass-ms", min=0.1, help="Milliseconds of a forward pass, for comparison.")
    ] = 20.0,
    as_json: options.AsJson = False,
) -> None:
    """Measure the decoder's own CPU time per token, on engines that need none.

    It runs beside the engines, which have processes of their own; a forward pass waits for it only where a step ends.
    """
    counts = options.numbers(requests, int, "--requests")
    if min(counts) < 1:
        raise typer.BadParameter("at least one reply", param_hint="--requests")
    found = []
    for count in counts:
        steps = max(10, tokens // count // step_tokens)
        found.append(measure(count, steps * step_tokens, steps, rejected=rejected, depth=depth))
    if as_json:
        typer.echo(json.dumps([asdict(one) | {"share": one.share(pass_ms / 1000)} for one in found]))
        return
    headings = ["replies at once", "steps accepted", "µs a token", "first tenth", "last tenth", "of a pass"]
    rows = [
        [
            str(one.requests),
            f"{one.accepted:.0%}",
            f"{one.microseconds:.0f}",
            f"{one.at_first:.0f}",
            f"{one.at_last:.0f}",
            f"{one.share(pass_ms / 1000):.1%}",
        ]
        for one in found
    ]
    Terminal().print(as_rich((headings, rows)))
    Terminal().print(f"A forward pass of {pass_ms:g} ms gives each reply one token.")
