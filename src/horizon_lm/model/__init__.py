"""Hugging Face models: opening them, finding their units, templates. The one place that knows their habits."""
