"""The rows by section; importing this package fills the table."""

from tests.seams.rows import (  # noqa: F401
    adapters,
    autograd,
    changes,
    errors,
    evaluation,
    face,
    generation,
    hooks,
    master,
    models,
    opening,
    optimizers,
    saving,
    trainers,
    trl_trainers,
    weights,
)
