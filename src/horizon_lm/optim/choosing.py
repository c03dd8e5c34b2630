"""The optimizer of a run, by its name in run files."""

from importlib import import_module
from typing import Any

from horizon_lm.optim.slab_optimizer import SlabOptimizer
from horizon_lm.optimizers import OPTIMIZERS


def optimizer_class(name: str) -> type[SlabOptimizer]:
    """Return the class of an optimizer by its name in `OPTIMIZERS`."""
    listed = OPTIMIZERS[name]
    found: type[SlabOptimizer] = getattr(import_module(listed.module), listed.name)
    return found


def make_optimizer(name: str, model: Any, settings: Any, **options: Any) -> SlabOptimizer:
    """Return an optimizer of a streamed model.

    Args:
        name: its name in `OPTIMIZERS`.
        model: the model.
        settings: settings of a run or of transformers, which have its hyperparameters.
        options: other arguments of its class.
    """
    cls: Any = optimizer_class(name)
    made: SlabOptimizer = cls(model, **cls.hyperparameters(settings), **options)
    return made
