"""What is learned: from a model and a batch to a loss."""
