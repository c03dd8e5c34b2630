"""A run: its settings, data, admission, losses, checkpoints and loop."""
