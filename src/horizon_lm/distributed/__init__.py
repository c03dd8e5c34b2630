"""Training with several processes, one for each device, on torch.distributed.

Every slab is cut into equal ranges (`memory.layout.ranks`), one for each rank of a *shard group*: a rank keeps, loads, lands and updates its own range
alone. Units are gathered on the devices, and gradients summed there, so each byte crosses a host link once per machine.
"""
