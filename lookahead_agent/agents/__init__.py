"""The library of the planner templates: nodes, tool calls, plans of calls, and calls that start early."""
