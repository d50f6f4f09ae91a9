"""What planner templates stand on: calls of tools, plans of calls, calls that start before their plan is complete."""
