"""Many users at once: their replies share one batch of the engines."""

import asyncio

from lookahead_agent import ChatLookahead


async def main() -> None:
    """Answer four at once."""
    with ChatLookahead(policy="balanced", temperature=0, max_tokens=60) as llm:
        questions = [f"What is {number} * 12?" for number in range(3, 7)]
        for reply in await asyncio.gather(*(llm.ainvoke(question) for question in questions)):
            print(reply.text.strip().split("\n")[-1])


if __name__ == "__main__":
    asyncio.run(main())
