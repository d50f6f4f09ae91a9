"""What LangChain sees: the chat model, its messages, its callbacks, its middleware."""
