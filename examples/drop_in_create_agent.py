"""An agent of LangChain's `create_agent`, with `ChatLookahead` in place of another chat model."""

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage

from lookahead_agent import ChatLookahead, LookaheadPolicyMiddleware
from lookahead_agent.agents.templates import template

with ChatLookahead(temperature=0) as llm:
    agent = create_agent(
        llm,
        [template("tools", "calculator").calculator],
        middleware=[LookaheadPolicyMiddleware(planning="balanced", acting="strict")],
    )
    state = agent.invoke({"messages": [HumanMessage("What is 17 * 23? Use the calculator.")]})
    print(state["messages"][-1].text)
