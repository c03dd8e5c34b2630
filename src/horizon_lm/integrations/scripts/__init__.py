"""Run an unchanged training script with its models streamed."""
