"""Target and draft behind vLLM servers: start `examples/serve_pair.sh TARGET DRAFT` first.

python examples/remote_engines.py TARGET DRAFT "What is 17 * 23?"
"""

from __future__ import annotations

import os
import sys

from lookahead_agent import ChatLookahead


def main(target: str, draft: str, question: str) -> None:
    """Ask a question, and show how many steps are the draft's."""
    llm = ChatLookahead(
        model=target,
        base_url=f"http://127.0.0.1:{os.environ.get('TARGET_PORT', '8000')}/v1",
        draft_model=draft,
        draft_url=f"http://127.0.0.1:{os.environ.get('DRAFT_PORT', '8001')}/v1",
        policy="exact",
        temperature=0,
        max_tokens=200,
    )
    with llm:
        message = llm.invoke(question)
    metadata = message.response_metadata["lookahead"]
    print(message.text)
    print(f"[{metadata['accepted']} of {metadata['steps']} steps from the draft]")


if __name__ == "__main__":
    main(*sys.argv[1:])
