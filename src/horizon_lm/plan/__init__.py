"""What a run needs, by arithmetic alone."""
