"""What a model's computations cost, found by running its own code: on the meta device, or on the real one for a trial."""
