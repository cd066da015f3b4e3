"""Choosing a tree for each step from measured step times and the acceptance seen so far (`tree="auto"`)."""
