"""One node is asked for something else halfway: how its replies are written changes, and changes back."""

from statistics import median

from lookahead_agent import ChatLookahead

THINGS = ["pens", "apples", "books", "tickets", "chairs", "stamps", "lamps", "boxes", "cups", "plants"]
SUMS = [
    f"A shop sells {number} {thing} at ${number % 7 + 2}.50 each and pays ${number} of rent. What is its profit?"
    for number, thing in enumerate(THINGS * 2, 11)
]
# What a small model makes up is not what a larger one does.
NAMES = [f"Invent {number} names of far planets, with no explanation: unusual ones." for number in range(11, 31)]


def main() -> None:
    """Ask three times twenty questions, and say how each was answered."""
    # Target and draft on cores of their own: then each reply is written in whatever way is fastest for its node.
    with ChatLookahead(token_speculation="guided", policy="balanced", temperature=0, max_tokens=120) as llm:
        for kind, questions in {"sums": SUMS, "names": NAMES, "sums again": SUMS[::-1]}.items():
            modes, paces = [], []
            for question in questions:
                told = llm.invoke(question).response_metadata["lookahead"]
                written = sum(told["tokens"][model]["committed"] for model in ("target", "draft"))
                modes.append(told["mode"])
                paces.append(1000 * told["seconds"]["total"] / written)
            print(f"{kind}: {median(paces):.0f} ms a token; {' '.join(modes)}")


if __name__ == "__main__":
    main()
