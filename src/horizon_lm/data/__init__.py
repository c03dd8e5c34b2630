"""Rows of files to conversations, to tokens with a mask, to the batch of any step."""
