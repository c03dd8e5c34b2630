"""Run the schedule of a pass: the engine, its buffers and copies, the forward pass and the backward pass."""
