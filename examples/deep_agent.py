"""An agent of `deepagents` on `ChatLookahead`: it keeps files, and gives tasks to subagents, by tool calls.

pip install './lookahead-agent[cpu]' deepagents
"""

from deepagents import create_deep_agent
from langchain_core.messages import HumanMessage

from lookahead_agent import ChatLookahead
from lookahead_agent.agents.templates import template
from lookahead_agent.agents.thinking import ThinkingMiddleware

with ChatLookahead(policies={"thinker": "balanced"}, policy="strict", temperature=0) as llm:
    agent = create_deep_agent(
        model=llm,
        tools=[template("tools", "calculator").calculator],
        system_prompt="You work out what is asked with the calculator, and write the result into a file.",
        middleware=[ThinkingMiddleware()],  # a thought with a policy of its own before each turn
    )
    state = agent.invoke({"messages": [HumanMessage("What is 17 * 23? Write it into /result.txt.")]})
    for name, file in state.get("files", {}).items():
        print(f"{name}: {file['content']}")
    print(state["messages"][-1].text)
