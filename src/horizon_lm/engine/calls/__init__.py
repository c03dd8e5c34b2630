"""One call of the model: from the arguments of its forward method to its output."""
