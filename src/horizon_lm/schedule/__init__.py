"""A training step as data: its operations, their streams, and their waits."""
