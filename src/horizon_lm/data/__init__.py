"""Turn rows of files into examples, examples into tokens with targets, and those into the batch of any step."""
