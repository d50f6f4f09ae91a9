"""Support for the planner templates: middleware, tools, plans of tool calls, and early tool calls."""
