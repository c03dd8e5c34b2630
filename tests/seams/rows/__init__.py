"""Rows by section; importing this package fills the table."""

from tests.seams.rows import (  # noqa: F401
    adapters,
    changes,
    evaluation,
    generation,
    hooks,
    master,
    models,
    optimizers,
    weights,
)
