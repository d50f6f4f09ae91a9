"""The first reply, and its tokens per forward pass of the target."""

from lookahead_agent import ChatLookahead

with ChatLookahead(policy="balanced", temperature=0, max_tokens=200) as llm:
    message = llm.invoke("A box holds 12 eggs. How many eggs are in 7 boxes?")
    print(message.text)
    metadata = message.response_metadata["lookahead"]
    tokens, passes = metadata["tokens"]["target"]["committed"], metadata["target_forward_passes"]
    print(f"[{tokens} tokens in {passes} forward passes of the target]")
