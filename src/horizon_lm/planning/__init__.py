"""Plan a run before it starts: the memory and time that it takes, and whether its machine has them."""
