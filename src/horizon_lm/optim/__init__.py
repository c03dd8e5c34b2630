"""The optimizer's step, on the host."""
