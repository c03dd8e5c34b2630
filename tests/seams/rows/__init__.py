"""Rows by section; importing this package fills the table."""

from tests.seams.rows import (  # noqa: F401
    adapters,
    changes,
    evaluation,
    face,
    generation,
    hooks,
    master,
    models,
    optimizers,
    saving,
    trainers,
    weights,
)
