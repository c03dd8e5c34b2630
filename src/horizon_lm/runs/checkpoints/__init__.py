"""Checkpoints of a training: its whole state on disk, written while it goes on."""
