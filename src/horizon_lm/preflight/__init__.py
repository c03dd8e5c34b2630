"""Checks before a run: the resources it needs, and whether they are available, from its settings and model config."""
