"""Hugging Face models: opening them, finding their units, and block templates. Only this package depends on their
details.
"""
