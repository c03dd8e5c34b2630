"""The persistent buffers of a model: read them from a file, and write them as exactly as they were read."""

from typing import Any

import torch

from horizon_lm.model.parts import ModelParts


def persistent_buffers(parts: ModelParts, store: Any) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of a model by name.

    Args:
        parts: the model.
        store: its `Store`, or another object with the names of its parameters in ``unit_of``.
    """
    parameters = {id(ref.param) for ref in parts.refs()}
    # Not the streamed model's own method, which waits for updates.
    state = torch.nn.Module.state_dict(parts.model, keep_vars=True)
    return {n: t for n, t in state.items() if n not in store.unit_of and id(t) not in parameters}


def fill_buffer(store: Any, name: str, buffer: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the value that a file has for a buffer. If this may round it, the store keeps the file's value, too."""
    buffer.copy_(source)
    store.source_buffers.pop(name, None)  # of a file that was read before
    if buffer.dtype not in (source.dtype, torch.float32):
        store.source_buffers[name] = source.clone()


def unrounded_buffers(parts: ModelParts, store: Any) -> dict[str, torch.Tensor]:
    """Return the persistent buffers as they are written: as they were in the file if the store has that value (`fill_buffer`) and
    the buffer has not changed since.
    """

    def unrounded(name: str, buffer: torch.Tensor) -> torch.Tensor:
        source = store.source_buffers.get(name)
        return buffer if source is None or not torch.equal(source.to(buffer), buffer) else source

    return {name: unrounded(name, buffer) for name, buffer in persistent_buffers(parts, store).items()}
