"""The LangChain side: the chat model, its messages, callbacks and structured output."""
