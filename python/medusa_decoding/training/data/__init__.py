"""Training data: records read from files, encoded as token ids, packed into rows, with targets per head."""
