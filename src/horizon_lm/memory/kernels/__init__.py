"""Compiled loops over host memory. They take numpy arrays, release the GIL, and compute the same bits on every machine."""
