"""The parameters of quantized weights: they have name, shape and dtype in the module tree, and no memory for values.

Their codes lie in host memory and are decoded on the device. Code that reads such a parameter gets decoded values, and code
that writes to it an error, because a write to a decoded copy would be lost.
"""

from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from horizon_lm.engine.host.parameters import METADATA, StreamedParameter
from horizon_lm.engine.host.same_values import is_wider_copy
from horizon_lm.errors import MissingQuantStateError, StreamingError
from horizon_lm.memory.store import Store

_RETURN_SELF = {torch.Tensor.detach, torch.Tensor.requires_grad_}
_SETTERS = {torch.Tensor.requires_grad_, torch._C.TensorBase.__dict__["requires_grad"].__set__}  # of requires_grad
_CASTS = {
    torch.Tensor.to, torch.Tensor.type, torch.Tensor.cpu, torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half,
    torch.Tensor.double,
}  # fmt: skip


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
        # A cast is accepted as for other weights: the codes stay.
        if value is not self and not is_wider_copy(value, self.decode()):
            _reject_write(self._name)

    def packed(self) -> torch.Tensor:
        """Return the codes and scales, 1-D uint8, as a view of host memory. Raise StreamingError as `decode` does."""
        self._store.require_whole()
        return self._store.packed(self._name)

    @property
    def packed_bytes(self) -> int:
        """The bytes of the codes and scales of the whole weight."""
        return self._store.codecs[self._name].num_bytes(self.shape)

    @property
    def quant_state(self) -> NoReturn:
        """bitsandbytes' description of codes, with which PEFT merges adapters into them."""
        raise MissingQuantStateError(self._name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The value is True if `requires_grad_` is called without one.
        if func in _SETTERS and kwargs.get("requires_grad", args[1] if len(args) > 1 else True):
            raise StreamingError(
                f"{args[0]._name} is quantized and cannot be trained; train adapters, or decode the weights with dequantize: true in a "
                "run file, or quantization_config={'dequantize': True}"
            )
        if func in METADATA or func in _RETURN_SELF or func is torch.empty_like:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            # The placeholder itself: a detached one would be a tensor without values, and without the methods of this class.
            return args[0] if func in _RETURN_SELF else result
        if func is torch.Tensor.data_ptr:
            raise StreamingError(
                f"{args[0]._name} is quantized: its values have no memory; call param.decode() for a copy of them"
            )
        _require_no_write(func, args, kwargs)
        if func in _CASTS and isinstance(args[0], PackedParameter) and _is_idle_cast(func, args, kwargs):
            return args[0]
        args, kwargs = tree_map_only(PackedParameter, _DecodedValues.of, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedParameter({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return memo.setdefault(id(self), nn.Parameter(self.decode(), False))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StreamingError(
            f"{self._name} is quantized and cannot be pickled; save the model with save_pretrained(), which decodes it"
        )


class _DecodedValues(torch.Tensor):
    """The decoded values of a quantized weight, or a view of them, to be read only. Values that are computed from them are plain tensors."""

    _name: str

    @staticmethod
    def of(param: PackedParameter) -> "_DecodedValues":
        """Return the values of a quantized weight."""
        return _DecodedValues._guard(param.decode(), param._name)

    @staticmethod
    def _guard(values: torch.Tensor, name: str) -> "_DecodedValues":
        """Return the values of a weight of this name, as a tensor that rejects writes."""
        guarded = values.as_subclass(_DecodedValues)
        guarded._name = name
        return guarded

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _require_no_write(func, args, kwargs)
        decoded = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _DecodedValues)]
        with torch._C.DisableTorchFunctionSubclass():
            names = {each.untyped_storage().data_ptr(): each._name for each in decoded}
            result = func(*args, **kwargs)
            if isinstance(result, np.ndarray):
                result.flags.writeable = False  # a write through numpy would be lost
            return tree_map_only(torch.Tensor, lambda each: _DecodedValues._view(each, names), result)

    @staticmethod
    def _view(result: torch.Tensor, names: dict[int, str]) -> torch.Tensor:
        """Return a result, guarded if it is a view of decoded values. ``names`` has their weights, by the address of the storage."""
        name = names.get(result.untyped_storage().data_ptr())
        return result if name is None else _DecodedValues._guard(result, name)


def _is_idle_cast(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a cast would return its tensor itself."""
    with torch._C.DisableTorchFunctionSubclass():
        tried = torch.empty(0, dtype=args[0].dtype)
        return func(tried, *args[1:], **kwargs) is tried


def _require_no_write(func: Any, args: Any, kwargs: Any) -> None:
    """Raise StreamingError if a function of torch would write to a quantized weight, given as its first argument (a function in place is
    known by its name) or as ``out``.
    """
    name = getattr(func, "__name__", "")  # torch calls `add_` for ``+=``
    is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    for each in tree_leaves((args[:1] if is_in_place else (), kwargs.get("out"))):
        if isinstance(each, (PackedParameter, _DecodedValues)):
            _reject_write(each._name)


def _reject_write(name: str) -> NoReturn:
    raise StreamingError(
        f"{name} is quantized, and its values cannot be changed. To edit weights, or to add adapters that change them (PEFT's pissa, olora, "
        "loftq), load the model with transformers without quantization, and call horizon_lm.stream() afterwards."
    )
