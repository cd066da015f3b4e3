"""What a step costs and a tree gains on a device, computed from bytes and operations (paper, appendix G)."""
