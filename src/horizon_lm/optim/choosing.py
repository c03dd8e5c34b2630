"""The optimizer of a run, by its name in run files."""

from collections.abc import Collection
from importlib import import_module
from typing import Any

from horizon_lm.common.optimizers import OPTIMIZERS
from horizon_lm.optim.slab_optimizer import SlabOptimizer


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


def decay_groups(model: Any, decayed: Collection[str], weight_decay: float) -> list[dict[str, Any]]:
    """Return a group of the trainable parameters named in ``decayed``, and one of the others, without decay; no empty ones."""
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [
        {"params": [param for name, param in params if name in decayed], "weight_decay": weight_decay},
        {"params": [param for name, param in params if name not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
