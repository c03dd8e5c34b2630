"""Compute the loss of a model on a batch: supervised, preference, and user-defined objectives."""
