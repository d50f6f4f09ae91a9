"""A node is asked for something else halfway: draft steps stop where they are refused, and come back later."""

from statistics import median

from langchain_core.runnables import RunnableConfig

from lookahead_agent import ChatLookahead

THINGS = ["pens", "apples", "books", "tickets", "chairs", "stamps", "lamps", "boxes", "cups", "plants"]
SUMS = [
    f"A shop sells {number} {thing} at ${number % 7 + 2}.50 each and pays ${number} of rent. What is its profit?"
    for number, thing in enumerate(THINGS * 2, 11)
]
# What a small model makes up is not what a larger one does.
TALES = [
    f"Invent a tale of {number} {thing}, in paragraphs of one sentence." for number, thing in enumerate(THINGS * 2)
]

NODE: RunnableConfig = {"metadata": {"langgraph_node": "writer"}}  # as a graph says it


def main() -> None:
    """Ask three times twenty questions, and say how each was answered."""
    # Without draft tokens, as where the target is behind a server. The planner's steps are commanded, so that the
    # draft has an engine of its own; how the writer's replies are written is free.
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
