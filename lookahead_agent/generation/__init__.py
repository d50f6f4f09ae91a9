"""One reply: its request, the backends that generate it, and the reader of its thinking, text and tool calls."""
