"""Plan a run before it starts: the memory and time that it takes."""
