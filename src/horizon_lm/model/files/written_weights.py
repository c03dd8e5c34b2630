"""The weights of a model as a folder has them: its parameters in the dtypes of the folder, and its persistent buffers."""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch

from horizon_lm.common.units import Unit
from horizon_lm.errors import CheckpointWarning, warn
from horizon_lm.memory.store import Store
from horizon_lm.model.files.tensors import Contents, Group, as_stored, group_of
from horizon_lm.model.opening import kept_in_float32
from horizon_lm.model.parts import ModelParts


class Weights(Protocol):
    """The parameters of a model: a `Store`, or the files of a checkpoint.

    Attributes:
        unit_of: the unit of each parameter, unit by unit.
        written_dtype: the dtype in which all of them are written by default; None to write each in the dtype of `meta`.
    """

    @property
    def unit_of(self) -> Mapping[str, Unit]: ...

    @property
    def written_dtype(self) -> torch.dtype | None: ...

    def meta(self, name: str) -> torch.Tensor:
        """Return a meta tensor with the shape of a parameter, and with the dtype of the file that it was read from."""
        ...

    def whole(self, unit: Unit) -> AbstractContextManager[None]:
        """Context manager: let the caller read the parameters of a unit."""
        ...

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter in a dtype if it is kept in it, or else with all of its bits, to be rounded."""
        ...


def main_dtype(weights: Weights) -> torch.dtype:
    """Return the dtype of a written model, as its config has it: that of its embedding, as transformers reads it from a model."""
    return weights.written_dtype or weights.meta(next(iter(weights.unit_of))).dtype


class WrittenWeights:
    """The parameters of a model, in the dtypes in which they are written. Implements `Tensors`.

    Args:
        weights: the parameters.
        dtypes: the dtype in which each of them is written.
        values: values that are written instead.
    """

    def __init__(self, weights: Weights, dtypes: Mapping[str, torch.dtype], values: Mapping[str, torch.Tensor]) -> None:
        self._weights, self._dtypes, self._values = weights, dtypes, values
        self._overflows = False  # of float16, by a weight that was read

    def meta(self, name: str) -> torch.Tensor:
        """Return a meta tensor with the shape and dtype of a parameter."""
        return self._weights.meta(name).to(self._dtypes[name])

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return parameters of one unit."""
        with self._weights.whole(self._weights.unit_of[names[0]]):
            return {name: self._read(name, self._dtypes[name]) for name in names}

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter, rounded to the dtype in which it is written. Warn about the first one that float16 makes infinite."""
        value = self._values[name].cpu() if name in self._values else self._weights.read(name, dtype)
        rounded = value.to(dtype)
        if dtype == torch.float16 and not self._overflows and rounded.isinf().any():
            self._overflows = True
            warn(
                f"{name} has values above 65,504, which float16 makes infinite; save the model in bfloat16",
                CheckpointWarning,
            )
        return rounded


def written_model(
    parts: ModelParts,
    weights: Weights,
    buffers: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    values: Mapping[str, torch.Tensor],
) -> Contents:
    """Return the weights of a model's folder, of which one unit is in memory at a time.

    Args:
        parts: the model.
        weights: its parameters.
        buffers: its persistent buffers.
        dtype: the dtype of all parameters but the ones that transformers keeps in float32; None for each one's own.
        values: values of parameters that are written instead of the model's.
    """
    model, uniform = parts.model, dtype or weights.written_dtype
    metas = {name: weights.meta(name) for name in weights.unit_of}
    dtypes = {name: uniform or meta.dtype for name, meta in metas.items()}
    if uniform is None:
        dtypes |= {name: value.dtype for name, value in values.items()}
    if dtype is not None:
        in_float32 = kept_in_float32(model, weights.unit_of, dtype) | parts.in_float32
        dtypes |= dict.fromkeys(in_float32 & dtypes.keys(), torch.float32)
    written = WrittenWeights(weights, dtypes, values)
    units: dict[Unit, list[str]] = {}
    for name, unit in weights.unit_of.items():
        units.setdefault(unit, []).append(name)
    groups = [group_of(written, names, partial(as_stored, model)) for names in units.values()]
    groups.append(_group_of_buffers(model, buffers))
    return Contents(groups, dtype or main_dtype(weights), sum(meta.numel() for meta in metas.values()))


def stored_tensors(parts: ModelParts, store: Store, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model with their names in a folder, unit by unit."""
    for group in written_model(parts, store, unrounded_buffers(parts, store), dtype, {}).groups:
        yield from group.read().items()


# Buffers


def persistent_buffers(parts: ModelParts, parameters: Container[str]) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of a model by name. ``parameters`` has the names of its parameters."""
    params = {id(ref.param) for ref in parts.refs()}
    # Not the streamed model's own method, which waits for updates.
    state = torch.nn.Module.state_dict(parts.model, keep_vars=True)
    return {n: t for n, t in state.items() if n not in parameters and id(t) not in params}


def unrounded_buffers(parts: ModelParts, store: Store) -> dict[str, torch.Tensor]:
    """Return the persistent buffers as they are written: as they were in the file if the store has that value (`fill_buffer`) and
    the buffer has not changed since.
    """

    def unrounded(name: str, buffer: torch.Tensor) -> torch.Tensor:
        source = store.source_buffers.get(name)
        return buffer if source is None or not torch.equal(source.to(buffer), buffer) else source

    return {name: unrounded(name, buffer) for name, buffer in persistent_buffers(parts, store.unit_of).items()}


def _group_of_buffers(model: Any, buffers: Mapping[str, torch.Tensor]) -> Group:
    """Return the group of a model's buffers, which are in memory."""
    meta = as_stored(model, {name: buffer.to("meta") for name, buffer in buffers.items()})
    return Group(meta, lambda: as_stored(model, {name: buffer.to("cpu") for name, buffer in buffers.items()}))
