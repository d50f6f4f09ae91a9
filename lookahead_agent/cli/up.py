"""`lookahead-agent up`: engines that stay between commands."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.cli import options
from lookahead_agent.cli.progress_bars import ProgressBars
from lookahead_agent.cli.terminal import Terminal
from lookahead_agent.engines import background
from lookahead_agent.engines.processes import leave_running
from lookahead_agent.errors import ConfigurationError, EngineStartError
from lookahead_agent.running.address import listening, log_path, private_folder
from lookahead_agent.running.connection import ask_keeper
from lookahead_agent.running.keeper import Keeper
from lookahead_agent.running.report import StartReport, follow

_COMMAND = "from lookahead_agent.cli.app import main; main()"


def up(
    model: options.Model = options.DEFAULT_MODEL,
    draft: options.Draft = None,
    policy: options.Policy = options.DEFAULT_POLICY,
    depth: options.Depth = None,
    token_speculation: options.TokenSpeculationMethod = options.DEFAULT_TOKEN_SPECULATION,
    precision: options.TargetPrecision = "auto",
    draft_precision: options.DraftPrecision = "auto",
    engine_arg: options.EngineArgument = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in the foreground, as for a service manager.")
    ] = False,
    grace: Annotated[int, typer.Option("--grace", min=0, help="Seconds that running replies have at `down`.")] = 60,
    report: Annotated[int | None, typer.Option("--report", hidden=True)] = None,
) -> None:
    """Keep engines running in the background: `ask`, `agent` and scripts with the same models answer at once.

    They are this user's alone, and stay until `lookahead-agent down`.
    """
    llm = options.chat_model(
        model=model,
        draft=draft,
        engine_args=engine_arg,
        policy=options.policy_of(policy, depth),
        token_speculation=token_speculation,
        precision=precision,
        draft_precision=draft_precision,
        use_daemon=False,
    )
    folder = private_folder()
    if (status := background.run(ask_keeper("status"))) is not None:
        _already(status, llm)
        return
    if foreground:
        with _only_one(folder):
            _keep(llm, StartReport(report), grace)
        return
    words = ["up", "--foreground", "--model", model, "--policy", policy, "--token-speculation", token_speculation]
    words += ["--precision", precision, "--draft-precision", draft_precision, "--grace", str(grace)]
    words += ["--draft", draft] if draft is not None else []
    words += ["--depth", str(depth)] if depth is not None else []
    words += [word for pair in engine_arg or () for word in ("--engine-arg", pair)]
    pid = _start(words)
    Terminal(stderr=True).print(
        f"Running in the background (process {pid}): ask, agent and scripts with these models use it.\n"
        "lookahead-agent status tells of it, lookahead-agent down ends it.",
    )


def _already(status: dict[str, Any], llm: ChatLookahead) -> None:
    if llm.backend.runtime is None or status["engines"] != llm.backend.runtime.spec.digest:
        raise ConfigurationError(
            f"other engines run in the background ({status['models']}): end them with `lookahead-agent down` first"
        )
    Terminal(stderr=True).print(f"Running already, in process {status['pid']}.")


def _start(words: list[str]) -> int:
    """Start a keeper as a process of its own session; returns its id once it can be used."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as lines, log_path().open("wb") as log:
        try:
            process = subprocess.Popen(
                # -P: what lies in the current folder is not imported.
                [sys.executable, "-P", "-c", _COMMAND, *words, "--report", str(writer)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                start_new_session=True,
            )
        finally:
            os.close(writer)
        try:
            pid = follow(lines, ProgressBars())
        except BaseException:  # Ctrl-C while it loads
            process.terminate()
            process.wait()
            raise
    if pid is None:
        process.wait()
        said = log_path().read_text(encoding="utf-8", errors="replace").strip().split("\n")
        reason = said[-1].removeprefix("Error: ") if said[-1] else f"exit status {process.returncode}"
        raise EngineStartError(f"the engines did not start: {reason} (all that they said: {log_path()})")
    leave_running(pid)
    return pid


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                "engines are being started or ended in the background: see `lookahead-agent status`"
            ) from None
        yield


def _keep(llm: ChatLookahead, report: StartReport, grace: int) -> None:
    with llm:
        llm.start(report)
        assert llm.backend.runtime is not None
        spec, context_length = llm.backend.runtime.spec, llm.backend.context_length()

        def about() -> dict[str, Any]:
            return {
                "engines": spec.digest,
                "models": " with ".join(spec.names[role] for role in ("target", "draft") if role in spec.names),
                "reason": llm.explain(),
                "context_length": context_length,
            }

        async def serve(listener: socket.socket) -> None:
            keeper = Keeper(llm.backend, spec.digest, about, grace=grace)
            await keeper.serve(listener, ready=lambda: report.ready(os.getpid()))

        with listening() as listener:
            background.run(serve(listener))
