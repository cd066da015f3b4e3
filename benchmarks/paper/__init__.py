"""The paper's tables and figures, reproduced beside the values that it prints."""
