"""Compiled loops over host memory. They know numpy arrays only, hold no lock, and give the same bits on any machine."""
