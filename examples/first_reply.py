"""The first reply, and what it took."""

from lookahead_agent import ChatLookahead

with ChatLookahead(policy="balanced", temperature=0, max_tokens=200) as llm:
    message = llm.invoke("A box holds 12 eggs. How many eggs are in 7 boxes?")
    print(message.text)
    took = message.response_metadata["lookahead"]
    print(f"[{took['tokens']['target']['committed']} tokens in {took['target_forward_passes']} passes of the target]")
