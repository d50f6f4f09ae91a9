"""A node gets other questions halfway: step speculation stops where draft steps are rejected, and comes back later."""

from statistics import median

from langchain_core.runnables import RunnableConfig

from lookahead_agent import ChatLookahead

THINGS = ["pens", "apples", "books", "tickets", "chairs", "stamps", "lamps", "boxes", "cups", "plants"]
SUMS = [
    f"A shop sells {number} {thing} at ${number % 7 + 2}.50 each and pays ${number} of rent. What is its profit?"
    for number, thing in enumerate(THINGS * 2, 11)
]
# Two models invent different tales.
TALES = [
    f"Invent a tale of {number} {thing}, in paragraphs of one sentence." for number, thing in enumerate(THINGS * 2)
]

NODE: RunnableConfig = {"metadata": {"langgraph_node": "writer"}}  # as in a graph


def main() -> None:
    """Ask three times twenty questions, and show the mode of each reply."""
    # Without token speculation, as where the target is behind a server. The planner's depth forces step speculation, so
    # that the draft has an engine of its own. The library decides for the writer.
    policies = {"planner": "balanced:depth=4", "writer": "balanced"}
    with ChatLookahead(token_speculation="none", policies=policies, temperature=0, max_tokens=120) as llm:
        for kind, questions in {"sums": SUMS, "tales": TALES, "sums again": SUMS[::-1]}.items():
            modes, paces, steps, accepted = [], [], 0, 0
            for question in questions:
                told = llm.invoke(question, NODE).response_metadata["lookahead"]
                written = sum(told["tokens"][model]["committed"] for model in ("target", "draft"))
                modes.append(told["mode"])
                paces.append(1000 * told["seconds"]["total"] / written)
                if told["mode"] == "lr":
                    steps, accepted = steps + told["steps"], accepted + told["accepted"]
            share = f"{accepted} of {steps} draft steps accepted"
            print(f"{kind}: {median(paces):.0f} ms a token; {share}; {' '.join(modes)}")


if __name__ == "__main__":
    main()
