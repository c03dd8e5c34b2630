"""The training loop, its metrics and its output folder."""
