"""The host's copy of the model: the authoritative one."""
