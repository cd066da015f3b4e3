"""Conversations as prompts: chat templates, rendered within bounds, and token ids."""
