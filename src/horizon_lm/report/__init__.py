"""A run's files as one HTML page. Nothing here imports torch, so that the command takes a second."""
