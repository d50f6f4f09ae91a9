"""`lookahead-agent up`, `status` and `down`: a server in the background, for this user's programs."""

import json
import sys
from typing import Annotated

import psutil
import typer

from lookahead_agent.cli import options
from lookahead_agent.cli.serve import server_runner
from lookahead_agent.cli.terminal import ProgressBars, Terminal, as_rich
from lookahead_agent.engines import background
from lookahead_agent.errors import ConfigurationError, EngineError
from lookahead_agent.generation.server_backend import server_status
from lookahead_agent.server.daemon import bound_socket, daemon_settings, log_path, private_dir, start_daemon, start_lock

_NOT_RUNNING = 3  # Exit status of `status` where nothing runs, as service managers have it
_FOREGROUND = "Stay in the foreground, as for a service manager."


@options.with_models
def up(
    models: options.ModelOptions,
    policy: options.Policy = options.DEFAULT_POLICY,
    depth: options.Depth = None,
    foreground: Annotated[bool, typer.Option("--foreground", help=_FOREGROUND)] = False,
    grace: Annotated[int, typer.Option(min=0, help="Seconds that running replies have at `down`.")] = 60,
) -> None:
    """Keep engines running in the background: `ask`, `agent` and scripts with the same models answer at once.

    They are this user's alone, and stay until `lookahead-agent down`.
    """
    llm = models.chat_model(policy=options.policy_of(policy, depth), use_daemon=False)
    run_server = server_runner()
    private_dir()
    assert llm.backend.runtime is not None
    if llm.backend.runtime.spec.remote:
        raise ConfigurationError("engines behind servers run already: `up` is for engines of this machine")
    digest = llm.backend.runtime.spec.digest
    stderr = Terminal(stderr=True)
    if (running := background.run(server_status())) is not None:
        if running.engines != digest:
            raise ConfigurationError(
                f"other engines run in the background ({running.models}): end them with `lookahead-agent down` first"
            )
        stderr.print(f"Running already, in process {running.pid}.")
    elif foreground:
        with start_lock(), bound_socket() as listener, llm:
            llm.start(ProgressBars())
            listener.listen()
            run_server(llm, daemon_settings(digest), listener, grace)
    else:
        pid = start_daemon([*sys.argv[1:], "--foreground"], lambda line: stderr.print(line, soft_wrap=True))
        stderr.print(
            f"Running in the background (process {pid}): ask, agent and scripts with these models use it.\n"
            "lookahead-agent status tells of it, lookahead-agent down ends it.",
        )


def status(as_json: options.AsJson = False) -> None:
    """Tell which engines run in the background; exit status 3 if none do."""
    running = background.run(server_status())
    if running is None:
        if as_json:
            typer.echo("null")
        else:
            Terminal(stderr=True).print("No engines run in the background: lookahead-agent up starts them.")
        raise typer.Exit(_NOT_RUNNING)
    if as_json:
        typer.echo(json.dumps({**running.model_dump(), "log": str(log_path())}))
        return
    minutes = int(running.seconds) // 60
    lasting = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
    rows = [
        ["models", running.models],
        ["process", f"{running.pid}, for {lasting}"],
        ["replies", f"{running.replies} written, {running.running} running"],
        ["engines", running.reason],
        ["log", str(log_path())],
    ]
    Terminal().print(as_rich((["", ""], rows), words=[""]))


def down() -> None:
    """End the engines that run in the background, once the replies that they write are complete."""
    terminal = Terminal(stderr=True)
    running = background.run(server_status())
    if running is None:
        terminal.print("No engines run in the background.")
        return
    if running.running:
        terminal.print(f"Waiting for {running.running} replies …")
    try:
        process = psutil.Process(running.pid)
        process.terminate()
        process.wait()
    except psutil.NoSuchProcess:
        return
    except psutil.Error as error:
        raise EngineError(f"process {running.pid} cannot be ended: {error}") from error
