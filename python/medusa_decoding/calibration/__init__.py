"""How often heads are right on the user's own prompts, and what a tree gains by it."""
