"""Trainers of other packages, made to train a streamed model."""
