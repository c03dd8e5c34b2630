"""Runs a schedule under autograd and the Hugging Face forward."""
