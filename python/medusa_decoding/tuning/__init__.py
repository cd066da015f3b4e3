"""Tuning: time steps on this device and choose the tree with the most tokens per second."""
