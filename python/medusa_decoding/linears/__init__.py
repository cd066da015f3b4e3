"""A model's linear modules, plain or quantised by a library: what the ops read of them, and how they are kept so."""
