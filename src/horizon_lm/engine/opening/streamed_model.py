"""A streamed Hugging Face model: the same module, whose forward pass runs through the engine."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from horizon_lm.distributed.whole_units import borrowing, lend, sharing
from horizon_lm.engine.calls.model_forward import ModelForward
from horizon_lm.engine.host.packed_parameters import PackedParameter
from horizon_lm.engine.opening.hf_arguments import hub_arguments
from horizon_lm.engine.opening.late_adapters import empty_adapters
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.streamed import engine_of
from horizon_lm.errors import ForeignWriteWarning, IgnoredArgumentWarning, StreamingError, warn
from horizon_lm.model.adapter_config import share_weights
from horizon_lm.model.files.checkpoint_loader import parameter_names
from horizon_lm.model.files.checkpoint_writer import save_pretrained
from horizon_lm.model.files.written_weights import stored_tensors


def synchronize(model: Any) -> None:
    """Block until all updates and gradients are in host memory, in ``param.data`` and ``param.grad``.

    Reading a parameter through torch waits automatically. Call this before you read its memory in another way (numpy
    views, raw pointers), and after you write to it, so that the next forward pass uses the new values.
    """
    engine = engine_of(model)
    engine.synchronize()
    engine.store.weights_changed()


def stats(model: Any) -> dict[str, Any]:
    """Return the memory use of a streamed model, and counters since it was streamed.

    Returns:
        ``device_bytes``, ``device_bytes_peak`` and ``device_bytes_by_kind``: bytes of the engine's buffers on the device;
        ``host_bytes`` and ``host_bytes_by_kind``: bytes of slabs, moments and boundaries;
        ``moved_bytes``: bytes copied over the link in host dtypes, by operation and unit (``"stream_in:block0"``);
        ``block_forward_rows``: rows computed by forward passes of blocks, summed over blocks.
    """
    engine = engine_of(model)
    counters = engine.device.counters
    host = dict(engine.store.num_bytes)
    if engine.boundaries.num_bytes:
        host["boundaries"] = engine.boundaries.num_bytes
    return {
        "device_bytes": counters.allocated_total,
        "device_bytes_peak": counters.allocated_peak,
        "device_bytes_by_kind": {k: v for k, v in counters.allocated.items() if v},
        "host_bytes": sum(host.values()),
        "host_bytes_by_kind": host,
        "moved_bytes": dict(counters.moved),
        "block_forward_rows": engine.counts["block_forward_rows"],
    }


def named_weights(model: Any, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights with their names, for an inference engine, while the model goes on to live in host memory.

    Names and shapes are those of the checkpoint that `save_pretrained` writes, for example one tensor for each expert. At any
    time one unit is converted; a weight that needs no conversion is a view of the model's memory, so copy what you keep.
    Call it between two steps.

    Args:
        model: a streamed model.
        dtype: dtype of the weights; None for the one in which they are streamed.

    Examples:
        >>> weights = dict(horizon_lm.named_weights(model, dtype=torch.bfloat16))
        >>> weights["model.norm.weight"].dtype
        torch.bfloat16
    """
    engine = engine_of(model)
    engine.synchronize()
    model._horizon.replaced.require_structure()
    yield from stored_tensors(engine.parts, engine.store, dtype or engine.store.precision.weight_dtype)


class StreamedModel:
    """The class that `attach` mixes into the model's class. It overrides what streaming changes, and rejects what is
    not supported.

    Attributes:
        placed_anywhere: the model was opened with a ``device_map`` that lets transformers choose the devices.
    """

    placed_anywhere = False

    @property
    def _horizon(self) -> ModelForward:
        """The model's forward pass, with its present adapters: reading it attaches the model again if they have changed."""
        horizon: ModelForward = self.__dict__["_horizon"]
        # Not within a pass, whose schedule and buffers are those of the engine that began it.
        if not horizon.engine.cursor.active:
            horizon.renew(horizon)
            horizon = self.__dict__["_horizon"]  # another one, if the adapters have changed
        return horizon

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Mark all gradients empty; no memory is written."""
        self.__dict__["_horizon"].engine.access.clear_grads()  # also of a model whose adapters have changed meanwhile

    # Weights in and out

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for updates and return torch's state dict. Its tensors share the model's memory, in the dtype of its
        precision. Adapters are returned as their fp32 masters, which PEFT saves.

        With several ranks, all of them call this, and get the adapters, but not the base.
        """
        if empty_adapters(self):  # which PEFT is about to fill
            self.__dict__["_horizon"].engine.synchronize()
            return super().state_dict(*args, **kwargs)  # type: ignore[misc]
        engine = self._horizon.engine
        engine.synchronize()
        prefix = kwargs.get(
            "prefix", args[1] if len(args) > 1 else ""
        )  # torch's arguments: destination, prefix, keep_vars
        if engine.access.has_parts and engine.parts.is_adapted:
            state = kwargs.get("destination", args[0] if args else None)
            return _add_whole_adapters(engine, OrderedDict() if state is None else state, prefix)
        state = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        if engine.store.precision.low_half and not kwargs.get("keep_vars"):
            for name in engine.parts.adapter_names & {key.removeprefix(prefix) for key in state}:
                state[prefix + name] = engine.store.master(name)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights, as in torch. In precision ``fp32_master``, float32 values are stored without rounding."""
        if assign and state_dict.keys() <= empty_adapters(self):
            return super().load_state_dict(state_dict, strict=strict, assign=True)  # type: ignore[misc]
        if assign:
            raise StreamingError(
                "load_state_dict(assign=True) would detach parameters from the store; use assign=False"
            )
        engine = self._horizon.engine
        engine.synchronize()
        # torch checks names and shapes, and copies into the views, where values are rounded. The writes below add the
        # bits that were lost.
        result = super().load_state_dict(state_dict, strict=strict)  # type: ignore[misc]
        names = parameter_names(self)  # also the further names of a tied weight
        loaded = {names[name]: value for name, value in state_dict.items() if names.get(name) in engine.refs}
        for name, value in loaded.items():
            engine.store.write(name, value)
        # torch's copies have raised the versions of the parameters, as foreign writes do; but low halves are not to
        # be reset.
        engine.foreign_writes.follow(with_low_halves=True)
        if engine.store.precision.low_half and any(value.dtype == torch.bfloat16 for value in loaded.values()):
            warn(
                "bfloat16 weights were loaded into a model in precision 'fp32_master': the 16 low bits of their fp32 masters "
                "are zero now. To continue a training, load the optimizer's state after the model's: it restores them.",
                ForeignWriteWarning,
            )
        return result

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        variant: str | None = None,
        token: str | bool | None = None,
        save_peft_format: bool = True,
        save_original_format: bool = True,
        distributed_checkpoint: bool = False,
        *,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a Hugging Face folder, one tensor at a time. With several ranks, all of them call this, and the first one writes.

        Args:
            save_directory: the folder; it is created if missing.
            is_main_process: write nothing if False.
            state_dict: values to write instead of the model's own, by name.
            push_to_hub: upload the folder afterwards; ``repo_id``, ``token`` and the like as in transformers.
            token, save_peft_format, save_original_format, distributed_checkpoint: as in transformers.
            max_shard_size: the maximum size of a file.
            variant: a part of the file names.
            dtype: the dtype of the written weights; None for float32 in precision ``float32``, and otherwise for the dtype
                they were loaded with.
            kwargs: as in transformers. An argument that is not supported has no effect but an IgnoredArgumentWarning, because
                the end of a training must not be lost.

        A model with adapters that `add_adapter` of transformers has added writes them alone, by transformers' own method, which
        takes all arguments but ``dtype``.
        """
        self._horizon.engine.synchronize()
        if self._horizon.is_adapter:  # transformers writes PEFT's folder, with the adapters only
            if dtype is not None:
                warn(
                    f"save_pretrained: dtype={dtype} has no effect on adapters, which keep theirs",
                    IgnoredArgumentWarning,
                )
            super().save_pretrained(  # type: ignore[misc]
                save_directory, is_main_process=is_main_process, state_dict=state_dict, push_to_hub=push_to_hub,
                max_shard_size=max_shard_size, variant=variant, token=token, save_peft_format=save_peft_format,
                save_original_format=save_original_format, distributed_checkpoint=distributed_checkpoint, **kwargs,
            )  # fmt: skip
            if is_main_process:
                share_weights(Path(save_directory))
            return
        formats = {"save_original_format": save_original_format, "distributed_checkpoint": distributed_checkpoint}
        hub = hub_arguments({"token": token, **formats, **kwargs})
        self._horizon.replaced.require_structure()
        engine = self._horizon.engine
        # The first rank decides for all: callers pass `rank == 0`, but the other ranks have to lend their parts.
        is_main_process = engine.mesh.exchange("model.save_pretrained", is_main_process)[0]
        if not is_main_process:
            return
        if engine.mesh.rank > 0:  # the first rank writes whole tensors, for which the others lend it their ranges
            lend(engine.mesh, engine.store)
            return
        with borrowing(engine.mesh, engine.store):
            save_pretrained(
                engine.parts, engine.store, save_directory, dtype, max_shard_size, values=state_dict, variant=variant
            )
        if push_to_hub:
            _upload(Path(save_directory), hub)

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Return the bytes of weights (and buffers) as they are stored in host memory: those of quantized weights are codes and scales."""
        packed = [param for param in self.parameters() if isinstance(param, PackedParameter)]  # type: ignore[attr-defined]
        whole: int = super().get_memory_footprint(return_buffers)  # type: ignore[misc]
        return whole + sum(param.packed_bytes - param.nbytes for param in packed)

    # Activation checkpointing, which a streamed model always does: other code may switch it on and off, and ask for the switch

    wants_checkpointing = False

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None, **kwargs: Any) -> None:
        """Record that activation checkpointing is wanted, with any arguments. Blocks are recomputed all the same."""
        self.wants_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        """Record that activation checkpointing is not wanted. Blocks are recomputed all the same."""
        self.wants_checkpointing = False

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.wants_checkpointing

    @property
    def is_activation_checkpointing(self) -> bool:
        return self.wants_checkpointing

    def get_compiled_call(self, compile_config: Any) -> Callable[..., Any]:
        """Return the call as it is: `generate` would compile the whole model for a static cache, but only blocks can be compiled."""
        return self.__call__  # type: ignore[operator]

    # Moving and casting: without effect, or rejected

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model if the call changes nothing; raise StreamingError otherwise."""
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self._unless_changed("to()", device, dtype)

    def cuda(self, device: Any = None) -> Any:
        return self._unless_changed("cuda()", torch.device("cuda"), None)

    def cpu(self) -> Any:
        return self

    def half(self) -> Any:
        return self._unless_changed("half()", None, torch.float16)

    def bfloat16(self) -> Any:
        return self._unless_changed("bfloat16()", None, torch.bfloat16)

    def float(self) -> Any:
        return self._unless_changed("float()", None, torch.float32)

    def double(self) -> Any:
        return self._unless_changed("double()", None, torch.float64)

    def _unless_changed(self, call: str, device: torch.device | None, dtype: torch.dtype | None) -> Any:
        """Return the model if it has this device and dtype already; raise StreamingError, which names the call, otherwise."""
        engine = self._horizon.engine
        same_device = device is None or device.type in ("cpu", engine.device.torch_device.type)
        if same_device and dtype in (None, engine.store.precision.weight_dtype):
            return self
        _reject_move(call)

    def to_empty(self, *args: Any, **kwargs: Any) -> Any:
        _reject_move("to_empty()")

    def share_memory(self) -> Any:
        _reject_move("share_memory()")

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Return the model if a function that torch applies to all tensors, for `to` for example, changes no device and no dtype."""
        # Tried on an empty tensor, because a function does not say which device and dtype it moves to.
        moved = function(torch.empty(0, dtype=self._horizon.engine.store.precision.weight_dtype))
        return self._unless_changed("to(), type() and the like", moved.device, moved.dtype)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        raise StreamingError(
            "resize_token_embeddings() is not supported: the weights of a streamed model have a fixed place in host memory; "
            "resize the model first, then call horizon_lm.stream()"
        )

    # Copies

    def __deepcopy__(self, memo: Any) -> Any:
        raise StreamingError(
            "a streamed model cannot be copied: it takes most of the machine's memory. Stream a copy of a plain model, or "
            "load a second one."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StreamingError(
            "a streamed model cannot be pickled (torch.save(model), multiprocessing). Save model.state_dict(), or write a "
            "folder with model.save_pretrained()"
        )


def _add_whole_adapters(engine: Engine, state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Add the whole parameters of units that are trained to a state dict, and return it. All ranks call this."""
    store = engine.store
    for unit in [unit for unit in store.units if unit not in store.frozen]:
        with sharing(engine.mesh, store, unit):
            for name in store.units[unit].layout:
                is_master = store.precision.low_half and name in engine.parts.adapter_names
                state[prefix + name] = store.master(name) if is_master else store.weight(name).clone()
    return state


def _reject_move(call: str) -> NoReturn:
    raise StreamingError(
        f"{call}: a streamed model cannot be moved or cast, its weights live in host memory; choose device and precision in "
        "horizon_lm.stream()"
    )


def _upload(folder: Path, arguments: dict[str, Any]) -> None:
    """Upload a folder to the hub, with arguments that `hub_arguments` has returned."""
    from huggingface_hub import HfApi, metadata_update

    token, tags = arguments.pop("token", None), arguments.pop("tags", None)
    api = HfApi(token=token)
    repo_id = api.create_repo(
        arguments.pop("repo_id", folder.name), private=arguments.pop("private", None), exist_ok=True
    ).repo_id
    api.upload_folder(repo_id=repo_id, folder_path=folder, **arguments)
    if tags:
        metadata_update(repo_id, {"tags": list(tags)}, overwrite=True, token=token)
