"""Read whole units: on the first rank, to which the other ranks lend their ranges, or a small one on all ranks."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from horizon_lm.common.units import Unit
from horizon_lm.distributed.mesh import Mesh
from horizon_lm.errors import StreamingError, first_line
from horizon_lm.memory.store import Store

_DONE = ""


@contextmanager
def borrowing(mesh: Mesh, store: Store) -> Iterator[None]:
    """Context manager: let the first rank read whole units (`Store.whole`), while the other ranks call `lend`.

    All ranks must have agreed that they are at the same place. The first rank broadcasts the name of each unit that it wants, and at the
    end `_DONE` and its error, which is an empty text if it has not failed.
    """

    def fill(unit: Unit) -> None:
        """Receive the ranges of a unit that the other ranks own into its slabs."""
        mesh.broadcast_text(str(unit))
        for tensor, cuts in _cut_tensors(store, unit):
            for rank in range(1, store.shard.count):
                part = tensor[cuts[rank] : cuts[rank + 1]]
                if part.numel():
                    mesh.transfer(part, rank, 0)

    store.fill = fill
    error = ""
    try:
        yield
    except BaseException as problem:
        error = f"{type(problem).__name__}: {first_line(problem)}"
        raise
    finally:
        store.fill = None
        mesh.broadcast_text(_DONE)
        mesh.broadcast_text(error)


def lend(mesh: Mesh, store: Store) -> None:
    """Lend this rank's ranges to the first rank until it is done.

    Raises:
        StreamingError: the first rank has failed.
    """
    while (text := mesh.broadcast_text("")) != _DONE:
        unit = Unit.parse(text)
        if mesh.rank >= store.shard.count:  # of another copy of the model
            continue
        for tensor, cuts in _cut_tensors(store, unit):
            part = tensor[store.shard.own(cuts)]
            if part.numel():
                mesh.transfer(part, mesh.rank, 0)
    error = mesh.broadcast_text("")
    if error:
        raise StreamingError(f"rank 0 has failed ({error})")


def _cut_tensors(store: Store, unit: Unit) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Yield the tensors of a unit's slabs, low halves and codes among them, each with the places at which the ranks cut it."""
    for slab in store.units[unit].all:
        for tensor in slab.tensors():
            yield tensor, slab.cuts


@contextmanager
def sharing(mesh: Mesh, store: Store, unit: Unit) -> Iterator[None]:
    """Context manager that all ranks enter: let each read a whole unit. At the end, each keeps only its own range in memory."""
    mesh.exchange(f"the reading of {unit}", None)
    for tensor, cuts in _cut_tensors(store, unit):
        for rank in range(store.shard.count):
            part = tensor[cuts[rank] : cuts[rank + 1]].view(torch.uint8)
            if part.numel():
                mesh.broadcast(part, rank)
    try:
        yield
    finally:
        store.release_others(unit)


@contextmanager
def sharing_moved(mesh: Mesh, store: Store, old: Store, old_names: Mapping[str, str]) -> Iterator[None]:
    """Context manager that all ranks enter: let each read the units of an old store whose weights a new store keeps in other memory.

    Args:
        mesh: the ranks.
        store, old: the stores.
        old_names: names in the old store of weights in the new one.
    """
    moved = {
        old.unit_of[name]
        for new, name in old_names.items()
        if new not in store.codecs and store.weight(new).data_ptr() != old.weight(name).data_ptr()
    }
    with ExitStack() as shared:
        for unit in sorted(moved, key=str):
            shared.enter_context(sharing(mesh, old, unit))
        yield
