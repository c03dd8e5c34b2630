"""The cost of a model's computations, found by running its own code on the meta device, or on the real one for a trial."""
