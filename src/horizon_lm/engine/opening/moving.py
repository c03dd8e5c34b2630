"""Move a parameter into a store."""

from collections.abc import Callable

import torch

from horizon_lm.memory.store import Store
from horizon_lm.model.parts import ParamRef


@torch.no_grad()
def move_in(ref: ParamRef, store: Store, values: Callable[[], torch.Tensor] | None = None) -> None:
    """Move the values of a parameter into a store, unless they are there already.

    Args:
        ref: the parameter, which becomes a view into the store.
        store: the store.
        values: function that returns the values, if they have more bits than the parameter.
    """
    if ref.name in store.codecs:  # a placeholder, whose codes were read into the store
        return
    place = store.weight(ref.name)
    if place.data_ptr() != ref.param.data_ptr():
        store.source_dtypes.setdefault(ref.name, ref.param.dtype)
        store.write(ref.name, ref.param.data if values is None else values())
        ref.param.data = place  # frees the original memory of the parameter
