"""Benchmark this machine, and describe it for bug reports."""
