"""The decode step, one file per stage in the paper's order.

prefill -> (propose -> arrange -> forward -> verify -> accept -> compact)*, driven by `loop`; the forward stage is the
backbone's own. `state` holds what a step reads and writes, all of it on the device.
"""
