"""The ops as Triton kernels, a file an op; imported only where they serve (see `_registry.triton_or`).

`launch` holds what they share: facts of a device, and the description of a compiled specialisation by which every
launch configuration can be compiled and inspected without a GPU.
"""
