"""Open a model: from a name, a folder or a model in memory to a streamed model."""
