"""Say where the bytes of a model lie: in slabs of host memory, in slots on the device, and how ranks divide them.

Arithmetic alone, without memory: the engine allocates what is laid out here, and the planner adds it up.
"""
