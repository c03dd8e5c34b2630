"""Compiled loops over host memory: numpy arrays in, the GIL released, and the same bits on every machine."""
