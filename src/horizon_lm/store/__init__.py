"""The authoritative copy of the model, in host memory."""
