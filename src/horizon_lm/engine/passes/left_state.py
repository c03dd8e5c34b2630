"""State that a block leaves to later blocks in a container among its arguments, such as shared keys and values.

Blocks are differentiated one by one, so gradients that pass through such a container would be missed. Some blocks write to one
that nothing reads: the last ones of Gemma 4, if no blocks share keys and values. So a block may write, but not read what
another one has written.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from horizon_lm.errors import ModelNotSupportedError

_IMMUTABLE = (torch.Tensor, bool, int, float, str, tuple, type(None))


@contextmanager
def rejecting_state(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Context manager around the forward pass of a block: replace all that it writes into containers by objects that reject any use.

    Args:
        name: the name of the block.
        args, kwargs: its arguments.

    Raises:
        ModelNotSupportedError: it has changed a container in another way, or one whose readers would not be noticed: plain
            lists and dicts are copied for each block.
    """
    containers = [value for value in (*args, *kwargs.values()) if not isinstance(value, _IMMUTABLE)]
    before = [_contents(container) for container in containers]
    yield  # the block runs
    for container, contents in zip(containers, before, strict=True):
        if isinstance(container, MutableMapping) and not isinstance(container, dict):
            written = [key for key, item in container.items() if contents.pop(key, None) != id(item)]
            container.update(dict.fromkeys(written, _Rejected(name)))
            changed = bool(contents)  # what the container had before and has lost, since `pop` removes the rest
        else:
            changed = _contents(container) != contents
        if changed:
            raise _error(name)


class _Rejected:
    """State that a block has left: any use of it raises ModelNotSupportedError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _reject(self, *_: Any) -> NoReturn:
        raise _error(self._name)

    __iter__ = __len__ = __getitem__ = __getattr__ = _reject


def _error(name: str) -> ModelNotSupportedError:
    return ModelNotSupportedError(
        f"{name} passes state to later blocks through a container among its arguments; "
        "streaming blocks one by one would give wrong gradients"
    )


def _contents(container: Any) -> dict[Any, int]:
    """Return the names and identities of what a container holds. Comparing tensors by value would wait for an accelerator."""
    if isinstance(container, list):
        return dict(enumerate(map(id, container)))
    items = container if isinstance(container, Mapping) else getattr(container, "__dict__", {})
    return {key: id(item) for key, item in items.items()}
