"""The losses of Medusa-1, Medusa-2 and self-distillation, computed in chunks of positions."""
