"""What trees cost and gain on a device: operators and roofline, simulated speedups, the paper's appendix G again."""
