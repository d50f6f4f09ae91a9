"""Replies of many agents through nginx and two vLLM servers, of which one is killed every minute.

python docs/measurements/replies_under_failures.py TARGET [--minutes 10] [--agents 64] [--every 60] [--tokens 96]
    [VLLM ARGUMENT…]

It needs nginx (apt-get install nginx). Each agent asks its question again and again, and compares the token ids with
those of its first reply, before any server is killed: use float32 (--dtype float32), since ties in bfloat16 depend on
the batch. At the end it prints the replies, the lost and the different ones, the resumptions, the memory of this
process, and the requests that are left in each engine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
from replicas_behind_nginx import CONFIGURATION, UPSTREAM, free_ports, process, read, wait_until_ready

from lookahead_agent import ChatLookahead

MIB = 1 << 20


class Replica:
    """A vLLM server on a port, which can be killed and started again."""

    def __init__(self, model: str, port: int, arguments: list[str]) -> None:
        self.port = port
        self._command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        self._command += ["--model", model, "--port", str(port), *arguments]
        self.start()

    def start(self) -> None:
        """Start the server, which is not ready yet."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def is_ready(self) -> bool:
        """Whether the server answers."""
        try:
            read(f"http://127.0.0.1:{self.port}/health")
        except (urllib.error.URLError, OSError):
            return False
        return True

    def kill(self) -> None:
        """Kill the server and its engine; Python's resource tracker then removes their shared memory."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        doomed = [child for child in children if not any("resource_tracker" in word for word in child.cmdline())]
        self.process.kill()
        for child in doomed:
            if child.is_running():
                child.kill()
        self.process.wait(60)
        psutil.wait_procs(children, timeout=60)

    def count_requests(self) -> float:
        """The running and waiting requests of the engine."""
        lines = read(f"http://127.0.0.1:{self.port}/metrics").splitlines()
        names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))


class Load:
    """The agents' replies, and what became of them."""

    def __init__(self, llm: ChatLookahead, agents: int) -> None:
        self._llm = llm
        self._questions = [f"Agent {number} asks: " + "what comes after this? " * 8 for number in range(agents)]
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.ended = threading.Event()

    def first_replies(self, threads: ThreadPoolExecutor) -> None:
        """Generate the replies with which later ones are compared."""
        self._expected = list(threads.map(self._tokens, self._questions))

    def _tokens(self, question: str) -> list[int]:
        message = self._llm.invoke(question)
        self.counts["resumptions"] += message.response_metadata["lookahead"]["resumptions"]
        return list(message.response_metadata["token_ids"])

    def run(self, number: int) -> None:
        """Ask one agent's question until the load ends."""
        while not self.ended.is_set():
            try:
                tokens = self._tokens(self._questions[number])
            except Exception as error:
                self.counts["lost"] += 1
                self.errors[str(error)[:200]] += 1
            else:
                self.counts["different"] += tokens != self._expected[number]
            self.counts["replies"] += 1


def run_with_failures(
    load: Load, replicas: list[Replica], agents: ThreadPoolExecutor, options: argparse.Namespace
) -> list[int]:
    """Run the load, kill a replica in turns while the other one is ready, and return the memory over time."""
    memory = []
    begun = killed_at = time.monotonic()
    running = [agents.submit(load.run, number) for number in range(options.agents)]
    while (now := time.monotonic()) - begun < options.minutes * 60:
        time.sleep(1)
        memory.append(psutil.Process().memory_info().rss)
        victim, other = replicas[load.counts["kills"] % 2], replicas[(load.counts["kills"] + 1) % 2]
        if now - killed_at >= options.every and other.is_ready() and victim.is_ready():
            killed_at = now
            load.counts["kills"] += 1
            victim.kill()
            victim.start()
            print(
                f"{now - begun:.0f} s: killed {victim.port}; {dict(load.counts)}; {memory[-1] // MIB} MiB", flush=True
            )
    load.ended.set()
    for each in running:
        each.result()
    return memory


def main() -> None:
    """Start the servers, run the load, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--every", type=float, default=60, help="seconds between two kills")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of a reply")
    options, arguments = parser.parse_known_args()
    port, *ports = free_ports(3)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        replicas = [Replica(options.target, each, arguments) for each in ports]
        for replica in replicas:
            stack.callback(replica.kill)
        for replica in replicas:
            wait_until_ready(replica.process, f"http://127.0.0.1:{replica.port}/health")
        servers = " ".join(f"server 127.0.0.1:{each} fail_timeout=5s;" for each in ports)
        upstream = UPSTREAM.format(name="target", port=port, servers=servers)
        (folder / "nginx.conf").write_text(CONFIGURATION.format(folder=folder, upstreams=upstream), encoding="utf-8")
        nginx = stack.enter_context(process("nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")))
        wait_until_ready(nginx, f"http://127.0.0.1:{port}/health")
        llm = ChatLookahead(
            model=options.target,
            base_url=f"http://127.0.0.1:{port}/v1",
            policy="off",
            temperature=0,
            max_tokens=options.tokens,
            return_token_ids=True,
        )
        with llm, ThreadPoolExecutor(options.agents) as agents:
            llm.start()
            load = Load(llm, options.agents)
            load.first_replies(agents)
            memory = run_with_failures(load, replicas, agents, options)
            for replica in replicas:
                wait_until_ready(replica.process, f"http://127.0.0.1:{replica.port}/health")
            left = [replica.count_requests() for replica in replicas]
    counts, settled = load.counts, memory[len(memory) // 10 :]
    print("| agents | minutes | kills | replies | lost | different | resumptions | memory: first, most, last | left |")
    print("|---" * 9 + "|")
    cells = [options.agents, options.minutes, *(counts[name] for name in ("kills", "replies", "lost", "different"))]
    cells += [counts["resumptions"], f"{settled[0] // MIB}, {max(settled) // MIB}, {settled[-1] // MIB} MiB"]
    print(f"| {' | '.join(map(str, cells))} | {' and '.join(f'{count:g}' for count in left)} |")
    for error, count in load.errors.most_common(5):
        print(f"{count} times: {error}")


if __name__ == "__main__":
    main()
