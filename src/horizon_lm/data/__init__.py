"""Rows of files to examples, to tokens with their targets, to the batch of any step."""
