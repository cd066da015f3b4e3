"""The ops as Triton kernels, one file per op; imported only when they serve an op (see `_registry.triton_or`).

Names in kernels have prefixes: `p_` pointers, `o_` offsets, `m_` masks, `b_` blocks, `i_` program indices; constants
are in capitals.
"""
