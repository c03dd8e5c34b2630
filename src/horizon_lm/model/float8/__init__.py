"""The products of blocks' linear layers in FP8, with a scale for each row of their operands."""
