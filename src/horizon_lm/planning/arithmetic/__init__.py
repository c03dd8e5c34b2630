"""Compute the memory and time of a run by arithmetic, without running it."""
