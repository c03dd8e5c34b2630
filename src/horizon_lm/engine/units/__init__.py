"""Compute and differentiate one unit: the embedding, a block, the head, or the outer parameters."""
