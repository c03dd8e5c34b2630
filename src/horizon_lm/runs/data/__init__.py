"""Turn rows of files into examples, examples into tokens with targets, and tokens into the batch of any step."""
