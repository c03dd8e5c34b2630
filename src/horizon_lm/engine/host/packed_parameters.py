"""The parameters of quantized weights: they have name, shape and dtype in the module tree, but no values to compute with.

Their codes lie in host memory and are decoded on the device. Code that would read a placeholder's values gets an error
instead of wrong numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from horizon_lm.engine.host.parameters import METADATA, StreamedParameter
from horizon_lm.errors import StreamingError
from horizon_lm.store.store import Store

_KEEPS = {torch.Tensor.detach, torch.Tensor.requires_grad_, torch.Tensor.contiguous}
_SETTERS = {torch.Tensor.requires_grad_, torch._C.TensorBase.__dict__["requires_grad"].__set__}  # of requires_grad
_reads = False  # values are decoded when they are read


class PackedParameter(StreamedParameter):
    """A quantized weight, which is never trained."""

    is_packed = True
    _store: Store
    _name: str

    @staticmethod
    def of(store: Store, name: str) -> "PackedParameter":
        """Return the placeholder of a quantized weight in a store."""
        param = torch.Tensor._make_subclass(PackedParameter, store.weight(name), False)
        param._store, param._name = store, name
        return param

    def decode(self) -> torch.Tensor:
        """Return a new tensor with the decoded values, in the dtype of the model's weights.

        Raises:
            StreamingError: other ranks have parts of them.
        """
        self._store.require_whole()
        return self._store.decode(self._name)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise StreamingError(
            f"{self._name} is quantized and its values cannot be replaced (an initialisation of adapters that changes the base, "
            "such as PiSSA, needs decoded weights: dequantize: true in a run file, or quantization_config={'dequantize': True})"
        )

    def packed(self) -> torch.Tensor:
        """Return the codes and scales, 1-D uint8, as a view of host memory. Raise StreamingError as `decode` does."""
        self._store.require_whole()
        return self._store.packed(self._name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The value is True if `requires_grad_` is called without one.
        if func in _SETTERS and kwargs.get("requires_grad", args[1] if len(args) > 1 else True):
            raise StreamingError(
                f"{args[0]._name} is quantized and cannot be trained; train adapters, or decode the weights with dequantize: true in a "
                "run file, or quantization_config={'dequantize': True}"
            )
        if func in METADATA or func in _KEEPS or func is torch.empty_like:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            # A detached placeholder would be a tensor without values, and without the error of this class.
            return args[0] if func in _KEEPS else result
        if _reads and not _writes(func, args, kwargs):  # a write would change a decoded copy, and be lost
            args, kwargs = tree_map_only(PackedParameter, PackedParameter.decode, (args, kwargs))
            return func(*args, **kwargs)
        found = next((each for each in tree_leaves((args, kwargs)) if isinstance(each, PackedParameter)), None)
        raise StreamingError(
            f"{'a weight' if found is None else found._name} is quantized: its codes lie in host memory and are decoded on the "
            f"device, so {getattr(func, '__name__', func)} cannot use its values; call param.decode() for a copy of them"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedParameter({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return memo.setdefault(id(self), nn.Parameter(self.decode(), False))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StreamingError(
            f"{self._name} is quantized and cannot be pickled; save the model with save_pretrained(), which decodes it"
        )


def _writes(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a function of torch would write to a quantized weight: to its first argument if it works in place, which its
    name shows, or to ``out``.
    """
    name = getattr(func, "__name__", "")  # torch calls `add_` for ``+=``
    is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    targets = tree_leaves((args[:1] if is_in_place else (), kwargs.get("out")))
    return any(isinstance(each, PackedParameter) for each in targets)


@contextmanager
def decoding() -> Iterator[None]:
    """Context manager: let code read quantized weights, each of which is decoded whenever it is read."""
    global _reads
    before, _reads = _reads, True
    try:
        yield
    finally:
        _reads = before
