"""A server on scripted engines: `python -m tests.unit.server_program SETTINGS_AS_JSON [MOST_OPEN_FILES]`."""

from __future__ import annotations

import resource
import signal
import socket
import sys

from lookahead_agent import ChatLookahead
from lookahead_agent.engines import ScriptedEngine, ScriptedTokenizer
from lookahead_agent.engines.scripted import reply_script
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.server import ServerSettings
from lookahead_agent.server.uvicorn_server import run_server

if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup, as the server then does
    settings = ServerSettings.model_validate_json(sys.argv[1])
    if len(sys.argv) > 2:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        print(listener.getsockname()[1], flush=True)
        engine = ScriptedEngine(ScriptedTokenizer(), reply_script(lambda _: "First this.\n\nThen that.\n\nIt is 4."))
        llm = ChatLookahead(engines=EngineSet(engine, engine), policies={"planner": "exact"}, max_tokens=50)
        run_server(llm, settings, listener, grace=60)
