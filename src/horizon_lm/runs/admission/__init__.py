"""Checks before a run, from its settings and model config: the resources that it needs, and whether they are available."""
