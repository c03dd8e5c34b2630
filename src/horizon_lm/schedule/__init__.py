"""The step as data: what is done, on which stream, after what."""
