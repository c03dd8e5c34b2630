"""Before a run: what it would take and whether there is room, from its settings and the model's config alone."""
