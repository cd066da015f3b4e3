"""Token selection: how the next token is picked at each node of the tree."""
