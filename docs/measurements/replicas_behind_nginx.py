"""Replies on two replicas of target and draft behind nginx, with the key of a reply, without it, and on one replica.

python docs/measurements/replicas_behind_nginx.py TARGET DRAFT [VLLM ARGUMENT…]

It needs nginx (apt-get install nginx), starts vLLM's servers and nginx on free ports, and prints a table: the prompt
tokens that were prefilled and the share from the prefix caches, the replies whose requests all went to one replica, and
the requests by replica.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lookahead_agent import ChatLookahead

REPLIES, THREADS = 40, 8
CONFIGURATION = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; worker_processes 1;
events {{ worker_connections 1024; }}
http {{
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi; client_max_body_size 64m;
    log_format replies "$upstream_addr $http_x_session_id$http_x_reply $request_uri";
    access_log {folder}/access.log replies;
    {upstreams}
}}
"""
UPSTREAM = """
    upstream {name} {{ hash $http_x_session_id consistent; {servers} keepalive 64; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://{name}; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_buffering off; proxy_read_timeout 600s;
        }}
    }}
"""


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def read(url: str) -> str:
    """The text at an address."""
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, and end it with the context."""
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield started
    finally:
        started.terminate()
        started.wait(60)


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    """Wait until an address answers; fails if the server ends."""
    while True:
        if server.poll() is not None:
            raise SystemExit(f"the server of {url} ended: start it yourself to see why")
        try:
            read(url)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)


def cached_tokens(ports: list[int]) -> tuple[float, float]:
    """Prompt tokens that vLLM's servers looked up in their prefix caches, and those found."""
    text = "".join(read(f"http://127.0.0.1:{port}/metrics") for port in ports)

    def total(name: str) -> float:
        return sum(
            float(value) for value in re.findall(rf"^vllm:prefix_cache_{name}_total\{{[^}}]*\}} (\S+)", text, re.M)
        )

    return total("queries"), total("hits")


def measure(
    label: str, folder: Path, ports: dict[str, list[int]], models: dict[str, str], headers: tuple[str, ...]
) -> str:
    """Generate the replies through an nginx of its own, and return the row of the table."""
    folder.mkdir()
    listen = dict(zip(ports, free_ports(len(ports)), strict=True))
    upstreams = "".join(
        UPSTREAM.format(
            name=role, port=listen[role], servers=" ".join(f"server 127.0.0.1:{port};" for port in ports[role])
        )
        for role in ports
    )
    (folder / "nginx.conf").write_text(CONFIGURATION.format(folder=folder, upstreams=upstreams), encoding="utf-8")
    with process("nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")) as nginx:
        wait_until_ready(nginx, f"http://127.0.0.1:{listen['target']}/health")
        llm = ChatLookahead(
            model=models["target"],
            base_url=f"http://127.0.0.1:{listen['target']}/v1",
            draft_model=models["draft"],
            draft_url=f"http://127.0.0.1:{listen['draft']}/v1",
            affinity_headers=headers,
            policy="exact",
            depth=4,
            temperature=0,
            max_tokens=64,
        )
        with llm:
            llm.start()
            questions = [f"{label}, question {number}: " + "what comes after this? " * 8 for number in range(REPLIES)]
            before = {role: cached_tokens(ports[role]) for role in ports}
            started = time.monotonic()
            with ThreadPoolExecutor(THREADS) as threads:
                steps = sum(
                    message.response_metadata["lookahead"]["steps"] for message in threads.map(llm.invoke, questions)
                )
            seconds = time.monotonic() - started
            after = {role: cached_tokens(ports[role]) for role in ports}
    looked_up, found_there = ({role: after[role][index] - before[role][index] for role in ports} for index in range(2))
    places: dict[str, dict[str, set[str]]] = {role: defaultdict(set) for role in ports}
    requests: dict[str, Counter[str]] = {role: Counter() for role in ports}
    roles = {f"127.0.0.1:{port}": role for role in ports for port in ports[role]}
    for line in (folder / "access.log").read_text(encoding="utf-8").splitlines():
        address, key, uri = line.split(" ", 2)
        # nginx logs "-" for a header that a request of no reply lacks, and for the address of one that ended too early.
        if key.strip("-") and uri.endswith("/completions") and address in roles:
            places[roles[address]][key].add(address)
            requests[roles[address]][address] += 1
    together = {role: sum(len(found) == 1 for found in places[role].values()) for role in ports}
    cells = [label, str(steps), f"{seconds:.1f} s"]
    for role in ports:
        cells += [f"{looked_up[role] - found_there[role]:,.0f}", f"{found_there[role] / max(1.0, looked_up[role]):.0%}"]
        cells += [f"{together[role]} of {len(places[role])}"]
        cells += [" and ".join(str(count) for _, count in sorted(requests[role].items()))]
    return f"| {' | '.join(cells)} |"


def main(target: str, draft: str, *arguments: str) -> None:
    """Start the servers, and print the table."""
    if shutil.which("nginx") is None:
        raise SystemExit("nginx is not installed: apt-get install nginx")
    models = {"target": target, "draft": draft}
    ports = dict(zip(models, ([first, second] for first, second in [free_ports(2), free_ports(2)]), strict=True))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for role in models:
            for port in ports[role]:
                command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
                command += ["--model", models[role], "--port", str(port), *arguments]
                servers.append((stack.enter_context(process(*command)), port))
        for server, port in servers:
            wait_until_ready(server, f"http://127.0.0.1:{port}/health")
        one = {role: found[:1] for role, found in ports.items()}
        print(
            "| replicas | steps | time | "
            + " | ".join(
                f"{role}: prefilled prompt tokens | {role}: cached | {role}: replies on one replica | {role}: requests"
                for role in models
            )
            + " |"
        )
        print("|---" * 11 + "|")
        print(measure("one", folder / "one", one, models, ("X-Session-ID",)), flush=True)
        print(measure("two, with the key", folder / "key", ports, models, ("X-Session-ID",)), flush=True)
        # The key is in a header that nginx logs and does not read.
        print(measure("two, without", folder / "without", ports, models, ("X-Reply",)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
