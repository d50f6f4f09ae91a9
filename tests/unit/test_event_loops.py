"""No reply blocks others: neither the background event loop nor the caller's reads files."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio, builtins, io, os
from lookahead_agent.testing import scripted_chat

seen = {True: [], False: []}

def watched(call):
    def watching(*arguments, **named):
        seen[asyncio._get_running_loop() is not None].append((call.__name__, str(arguments[0])))
        return call(*arguments, **named)
    return watching

async def ask(policy):
    llm = scripted_chat("One.\\n\\nTwo.", policy=policy)
    assert (await llm.ainvoke("q")).text
    async for _ in llm.astream("q"):
        pass

asyncio.run(ask("exact"))  # imports what is imported at the first call
os.stat, os.listdir, os.scandir = watched(os.stat), watched(os.listdir), watched(os.scandir)
builtins.open, io.open = watched(open), watched(io.open)
for policy in ("balanced", "balanced:depth=2", "fast", "risk=0.02", "strict"):
    asyncio.run(ask(policy))
print(seen[True])
print(len(seen[False]))
"""


def test_files_are_read_only_outside_of_event_loops() -> None:
    process = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False)
    assert process.returncode == 0, process.stderr
    reads_in_loops, other_reads = process.stdout.splitlines()
    assert reads_in_loops == "[]"
    assert int(other_reads) > 0, "certificates are read in other threads"
