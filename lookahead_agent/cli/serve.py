"""`lookahead-agent serve`, an OpenAI-compatible server, and `up`, `status` and `down`, which control the daemon."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

import psutil
import typer
from pydantic import SecretStr, ValidationError

from lookahead_agent.certificates.drift_monitor import AUDIT_RATE
from lookahead_agent.cli import options
from lookahead_agent.cli.terminal import ProgressBars, Terminal, as_rich
from lookahead_agent.errors import ConfigurationError, EngineError, extra_imports
from lookahead_agent.generation.server_backend import server_status
from lookahead_agent.server import ServerSettings
from lookahead_agent.server.daemon import (
    bind_socket,
    daemon_settings,
    find_starting_pid,
    log_path,
    private_dir,
    start_daemon,
    start_lock,
)
from lookahead_agent.system import background

_LOCAL = frozenset({"127.0.0.1", "::1", "localhost"})
_KEY = "LOOKAHEAD_SERVER_KEY"

_BODY = "Longest body of a request, in bytes. Default: 32 a token of the context, and 64 KiB, up to 4 MiB."
_NODE_POLICY = "Policy of a graph's node (X-Lookahead-Node). Repeatable."
_HOSTS = (
    "Name by which clients may call the server, beside localhost, --host and IP addresses; *.example.com for all that "
    "end so, * for all. Repeatable."
)
_ORIGIN = "Origin of web pages that may call it. Repeatable."
_KEY_FILE = "File with one API key a line; each is a client with its own cache and share. Beside LOOKAHEAD_SERVER_KEY."
_TIMEOUT = "Seconds without a token after which a reply fails. Default: 120, in which no reply gets a token."
_START_MODELS = "Let the policy of a request start models that do not run; others wait meanwhile."
StartModels = Annotated[bool, typer.Option("--start-models", help=_START_MODELS)]
_AUDIT = "Share of the steps accepted by a certificate that are looked at again."


@options.with_option_group
def serve(
    models: options.ModelOptions,
    host: Annotated[str, typer.Option(help="Address to listen on; the default is this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for a free one.")] = 8000,
    policy: options.Policy = options.DEFAULT_POLICY,
    node_policy: Annotated[list[str] | None, typer.Option(metavar="NODE=POLICY", help=_NODE_POLICY)] = None,
    served_model: Annotated[str | None, typer.Option(help="The model's name here. Default: as with --model.")] = None,
    audit_rate: Annotated[float, typer.Option(min=0, max=1, help=_AUDIT)] = AUDIT_RATE,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a reply.")] = 4096,
    max_body: Annotated[int | None, typer.Option(min=1, help=_BODY)] = None,
    concurrent: Annotated[int, typer.Option(min=1, help="Replies that are written at once.")] = 32,
    queue: Annotated[int, typer.Option(min=0, help="Replies that may wait; beyond, 429.")] = 64,
    stored_responses: Annotated[int, typer.Option(min=0, help="Responses that are kept for later requests.")] = 1000,
    stored_bytes: Annotated[int, typer.Option(min=0, help="Most bytes of the kept responses.")] = 64 << 20,
    allowed_host: Annotated[list[str] | None, typer.Option(metavar="NAME", help=_HOSTS)] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(metavar="ORIGIN", help=_ORIGIN)] = None,
    key_file: Annotated[Path | None, typer.Option(help=_KEY_FILE)] = None,
    start_models: StartModels = False,
    timeout: Annotated[float | None, typer.Option(min=0.1, help=_TIMEOUT)] = None,
    request_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a request to arrive.")] = 20,
    max_connections: Annotated[int, typer.Option(min=1, help="Most connections at once.")] = 512,
    grace: Annotated[int, typer.Option(min=0, help="Seconds that running replies have to end at shutdown.")] = 60,
) -> None:
    """Serve the model like OpenAI's API: /v1/chat/completions, /v1/responses, /v1/models, /health, /metrics.

    If the environment variable LOOKAHEAD_SERVER_KEY is set, clients must send its value as the API key.
    """
    run_server = server_runner()
    keys = server_keys(key_file)
    if host not in _LOCAL and not keys:
        message = f"anybody who reaches {host} could use the server: set {_KEY} to a key that clients must send"
        raise typer.BadParameter(message, param_hint="--host")
    llm = models.chat_model(
        policy=options.policy_of(policy, None),
        use_daemon=False,
        policies=options.node_policies(node_policy),
        audit_rate=audit_rate,
        max_tokens=max_tokens,
        **({"timeout": timeout} if timeout is not None else {}),
    )
    settings = ServerSettings(
        api_key=keys,
        served_model=served_model,
        max_body_bytes=max_body,
        max_tokens=max_tokens,
        concurrent=concurrent,
        queue=queue,
        stored_responses=stored_responses,
        stored_bytes=stored_bytes,
        allowed_hosts=("localhost", host, *(allowed_host or ())),
        start_models=start_models,
        cors_origins=tuple(cors_origin or ()),
        request_timeout=request_timeout,
        connections=max_connections,
    )
    # It listens before the models load: a second server on this address ends here, and clients get status 503.
    with closing(_listen(host, port)) as listener, llm:
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{listener.getsockname()[1]}/v1"
        stderr = Terminal(stderr=True)
        run_server(
            llm,
            settings,
            listener,
            grace,
            progress=ProgressBars(),
            on_ready=lambda: stderr.print(f"Serving on {address} (Ctrl-C to stop)"),
        )


def server_keys(file: Path | None) -> tuple[SecretStr, ...]:
    """Read the API keys of the environment and of a file; no error contains one."""
    keys: list[SecretStr] = []
    sources = {_KEY: [os.environ[_KEY]] if os.environ.get(_KEY) else []}
    if file is not None:
        try:
            lines = file.read_text(encoding="ascii").splitlines()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it has characters outside of ASCII"
            raise typer.BadParameter(f"{file} cannot be read: {reason}", param_hint="--key-file") from None
        sources[str(file)] = [line for line in lines if line.strip()]
        if not sources[str(file)]:
            raise typer.BadParameter(f"{file} has no key", param_hint="--key-file")
    for source, texts in sources.items():
        try:
            keys += ServerSettings.model_validate({"api_key": texts}).api_key
        except ValidationError as error:
            raise ConfigurationError(f"{source}: {error.errors(include_input=False)[0]['msg']}") from None
    return tuple(keys)


def server_runner() -> Callable[..., None]:
    """Import the function that runs a server; raises MissingExtraError without the extra."""
    with extra_imports("the server needs its extra: pip install 'lookahead-agent[server]'"):
        from lookahead_agent.server.uvicorn_server import run_server
    return run_server


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens: an address that another server has bound, even if it loads, is refused."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from error
    return listener


_NOT_RUNNING = 3  # Exit status of `status` if nothing runs, as for service managers
_END_SECONDS = 600.0  # Seconds until `down` gives up a daemon that does not end
_FOREGROUND = "Stay in the foreground, as for a service manager."


@options.with_option_group
def up(
    models: options.ModelOptions,
    policy: options.Policy = options.DEFAULT_POLICY,
    depth: options.Depth = None,
    foreground: Annotated[bool, typer.Option("--foreground", help=_FOREGROUND)] = False,
    start_models: StartModels = False,
    grace: Annotated[int, typer.Option(min=0, help="Seconds that running replies have at `down`.")] = 60,
) -> None:
    """Keep engines running in the background: `ask`, `agent` and scripts with the same models answer at once.

    Only this user can reach them, and they run until `lookahead-agent down`.
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
            problem = f"other engines run in the background ({running.models})"
            raise ConfigurationError(f"{problem}: end them with `lookahead-agent down` first")
        stderr.print(f"Running already, in process {running.pid}.")
    elif foreground:
        with start_lock() as lock, bind_socket() as listener, llm:
            llm.start(ProgressBars())
            listener.listen()
            lock.truncate(0)  # no longer a `find_starting_pid`
            run_server(llm, daemon_settings(digest, start_models=start_models), listener, grace)
    else:
        pid = start_daemon([*sys.argv[1:], "--foreground"], lambda line: stderr.print(line, soft_wrap=True))
        stderr.print(
            f"Running in the background (process {pid}): ask, agent and scripts with these models use it.\n"
            "lookahead-agent status shows it, lookahead-agent down ends it.",
        )


def status(as_json: options.AsJson = False) -> None:
    """Show which engines run in the background; exit status 3 if none do."""
    running = background.run(server_status())
    if as_json:
        typer.echo(json.dumps(running and {**running.model_dump(), "log": str(log_path())}))
    elif running is None:
        pid = find_starting_pid()
        hint = f"process {pid} is loading them" if pid else "lookahead-agent up starts them"
        Terminal(stderr=True).print(f"No engines run in the background: {hint}.")
    if running is None:
        raise typer.Exit(_NOT_RUNNING)
    if as_json:
        return
    hours, minutes = divmod(int(running.seconds) // 60, 60)
    uptime = f"{hours} h {minutes} min" if hours else f"{minutes} min"
    rows = [
        ["models", running.models],
        ["process", f"{running.pid}, for {uptime}"],
        ["replies", f"{running.replies} written, {running.running} running"],
        ["engines", running.reason.partition("\n\n")[0]],  # the reason without the table of measured replies
        ["log", str(log_path())],
    ]
    Terminal().print(as_rich((["", ""], rows), words=[""]))


def down() -> None:
    """Stop the engines in the background, once their running replies are complete; while they load, at once."""
    terminal = Terminal(stderr=True)
    if (pid := find_starting_pid()) is None:
        running = background.run(server_status())
        if running is None:
            terminal.print("No engines run in the background.")
            return
        if running.running:
            terminal.print(f"Waiting for {running.running} replies …")
        pid = running.pid
    try:
        process = psutil.Process(pid)
        process.terminate()
        wait_for_end(process)
    except psutil.NoSuchProcess:
        return
    except psutil.Error as error:
        raise EngineError(f"process {pid} cannot be ended: {error}") from error


def wait_for_end(process: psutil.Process) -> None:
    """Wait for the end of the daemon, whose running replies have time; raises EngineError if it cannot end."""
    deadline = time.monotonic() + _END_SECONDS
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if process.status() == psutil.STATUS_STOPPED or time.monotonic() > deadline:
            state = "is stopped" if process.status() == psutil.STATUS_STOPPED else "does not end"
            raise EngineError(f"process {process.pid} {state}: `kill -9 {process.pid}` ends it and its engines")
        with suppress(psutil.TimeoutExpired):
            process.wait(0.5)
