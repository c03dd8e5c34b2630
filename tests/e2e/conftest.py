"""Fixtures of the command-line tests."""

from tests.support.run_fixtures import base, drawn, model, runs, undrawn

__all__ = ["base", "drawn", "model", "runs", "undrawn"]
