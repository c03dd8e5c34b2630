"""A Hugging Face model, streamed: the same module, whose forward runs through the engine."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from horizon_lm.device.base import Device
from horizon_lm.engine.engine import Engine
from horizon_lm.engine.memory import Options
from horizon_lm.engine.parameters import HeadParameter, StreamedParameter, adopt
from horizon_lm.engine.streaming import Streaming
from horizon_lm.errors import ConfigError, StreamingError
from horizon_lm.model.parts import ModelParts
from horizon_lm.store.save import save_pretrained
from horizon_lm.store.store import Store


class StreamedModel:
    """Mixed into the model's own class by `attach`; overrides what streaming changes, refuses what it cannot do."""

    _horizon: Streaming

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._horizon.forward(args, kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Mark all gradients empty; no memory is written."""
        self._horizon.engine.clear_grads()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._horizon.engine.check_alive()
        self._horizon.engine.drain()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if assign:
            raise StreamingError(
                "load_state_dict(assign=True) would detach parameters from the store; use assign=False"
            )
        engine = self._horizon.engine
        engine.drain()
        result = super().load_state_dict(state_dict, strict=strict)  # type: ignore[misc]
        for name in engine.refs:
            if name in state_dict:
                engine.store.write(name, state_dict[name])
        engine.weights_changed()
        return result

    def save_pretrained(self, save_directory: str | Path, dtype: torch.dtype | None = None, max_shard_size: int | str = "50GB", **kwargs: Any) -> None:  # fmt: skip
        """Write a Hugging Face folder, one tensor at a time.

        Args:
            save_directory: the folder; made if missing.
            dtype: of the written weights; None for the dtype they were loaded with.
            max_shard_size: largest size of one file.
        """
        if kwargs:
            raise ConfigError(f"save_pretrained of a streamed model does not know {', '.join(sorted(kwargs))}")
        self._horizon.engine.check_alive()
        self._horizon.engine.drain()
        save_pretrained(self._horizon.engine.parts, self._horizon.engine.store, save_directory, dtype, max_shard_size)

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """No effect: every block is recomputed already."""
        warnings.warn("gradient checkpointing has no effect: a streamed model recomputes every block", stacklevel=2)

    def gradient_checkpointing_disable(self) -> None:
        """No effect: a streamed model always recomputes its blocks."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Moving is refused: the weights live in host memory and are streamed. A call that changes nothing is fine."""
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        streamed = self._horizon.engine.device.torch_device
        if dtype is None and (device is None or device.type in ("cpu", streamed.type)):
            return self
        raise StreamingError(
            "a streamed model cannot be moved or cast with .to(); choose device and precision in horizon_lm.stream()"
        )

    def _refuse(self, name: str) -> Any:
        raise StreamingError(
            f"{name}() is not possible on a streamed model, whose weights live in host memory; choose device and "
            "precision in horizon_lm.stream()"
        )

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        return self._refuse("cuda")

    def cpu(self) -> Any:
        return self

    def half(self) -> Any:
        return self._refuse("half")

    def bfloat16(self) -> Any:
        return self._refuse("bfloat16")

    def float(self) -> Any:
        return self._refuse("float")

    def double(self) -> Any:
        return self._refuse("double")

    def __deepcopy__(self, memo: Any) -> Any:
        raise StreamingError(
            "a streamed model cannot be copied: its slabs are most of the machine's memory. Stream the copy of a plain "
            "model, or load a second one."
        )

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        return self._refuse("resize_token_embeddings")


def attach(parts: ModelParts, store: Store, device: Device, options: Options) -> Any:
    """Make a model streamed. Its parameters must already be views into ``store``."""
    model = parts.model
    if isinstance(model, StreamedModel):
        raise StreamingError("the model is streamed already")
    engine = Engine(parts, store, device, options)
    device.register_host([slabs.weights for slabs in store.units.values() if slabs.weights.numel()])
    for name, ref in engine.refs.items():
        heads = any(module is parts.head for module, _ in ref.places)
        adopt(ref.param, HeadParameter if heads else StreamedParameter, engine)
        assert ref.param.data_ptr() == store.weight(name).data_ptr() or ref.param.numel() == 0
    cls = type(model)
    # The same name and module: transformers identifies classes by them.
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    streamed = type(cls.__name__, (StreamedModel, cls), namespace)
    model._horizon = Streaming(engine, cls)
    model.__class__ = streamed
    return model
