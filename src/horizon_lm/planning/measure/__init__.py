"""Find the cost of a model's computations by running its code on the meta device, or on the real device for a trial."""
