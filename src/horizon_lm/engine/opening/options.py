"""The arguments of `horizon_lm.stream`: validate them, check the model against them, and attach the model to its
device.
"""

import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from horizon_lm.cost.block_probe import find_written
from horizon_lm.cost.head_probe import head_peak
from horizon_lm.device.base import Device
from horizon_lm.device.cpu import CpuDevice
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.distributed.mesh import find_mesh
from horizon_lm.engine.calls.model_forward import ModelForward
from horizon_lm.engine.opening.attaching import attach
from horizon_lm.engine.opening.late_adapters import are_adapters_changed, attach_again
from horizon_lm.engine.passes.device_buffers import EngineOptions
from horizon_lm.engine.passes.recompute import outside_inference_mode
from horizon_lm.errors import ConfigError, HeadWarning, ModelNotSupportedError, UnprovenModelWarning, warn
from horizon_lm.model import capture
from horizon_lm.model.adapter_kinds import require_adapters_that_stream
from horizon_lm.model.examination import Examined, examine
from horizon_lm.model.head_path import ChunkedPath, find_chunked_path
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.proven import warn_of_other_version
from horizon_lm.model.routed_experts import find_divisible_experts
from horizon_lm.model.units import find_parts
from horizon_lm.planning.residency import Residency, head_chunk_tokens
from horizon_lm.planning.tile_sizes import NOT_COMPILED, no_experts
from horizon_lm.store.precision import Precision, get_precision
from horizon_lm.store.store import Store
from horizon_lm.streaming_options import StreamingOptions


@dataclass(frozen=True, kw_only=True)
class StreamArguments(StreamingOptions):
    """The arguments of `horizon_lm.stream`, documented there. Invalid arguments raise ConfigError."""

    device: str | Device = "auto"
    compute_dtype: torch.dtype | None = None
    check_recompute: bool = False
    attn_implementation: str | None = None
    check_gradients: int = 0
    allow_unproven_model: bool = False
    device_mesh: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # The dataclass is frozen because many hold it. What `auto` means is settled here, before anybody does.
        if self.device == "auto":
            object.__setattr__(self, "device", "cuda" if torch.cuda.is_available() else "cpu")
        object.__setattr__(self, "device_mesh", find_mesh(self.device_mesh, device_of(self.device)))
        # For its errors, before a model is touched.
        self.get_precision()
        if self.expert_tile is not None and self.compile is True:
            raise ConfigError(NOT_COMPILED)
        if isinstance(self.expert_tile, str):
            raise ConfigError(
                f"expert_tile is {self.expert_tile!r}; choose a number of experts, or None for whole blocks"
            )
        if self.check_gradients < 0:
            raise ConfigError(f"check_gradients is {self.check_gradients}; it must be a number of blocks, 0 for none")

    def get_precision(self, parts: ModelParts | None = None) -> Precision:
        """Return the formats of weights and gradients in host memory. Gradients of adapters are small, and kept in float32."""
        dtype = getattr(torch, self.grad_dtype, None) if isinstance(self.grad_dtype, str) else self.grad_dtype
        if dtype is None and self.grad_dtype is not None:
            raise ConfigError(f"grad_dtype is {self.grad_dtype!r}; choose bfloat16 or float32")
        if dtype is None and parts is not None and parts.frozen_base():
            dtype = torch.float32
        return get_precision(self.precision, dtype)

    def examine(self, model: Any) -> Examined:
        """Find the units of a model. Reject a model that cannot be streamed before any of its parameters is moved."""
        require_adapters_that_stream(model)
        capture.install_hooks(model)  # so that its own hooks do not count as foreign hooks later
        parts = find_parts(model)
        configs = getattr(model, "peft_config", None) or {}
        if self.device_mesh is not None and any(getattr(each, "modules_to_save", None) for each in configs.values()):
            raise ModelNotSupportedError(
                "modules_to_save is not supported with several processes: PEFT reads whole copies of the modules; use one process"
            )
        examined = examine(
            parts, attn_implementation=self.attn_implementation, on_accelerator=self._on_accelerator,
            in_micro_batches=self.in_micro_batches, allow_unproven_model=self.allow_unproven_model,
        )  # fmt: skip
        if self.expert_tile is not None and not find_divisible_experts(parts):
            raise ModelNotSupportedError(no_experts(type(model).__name__))
        if examined.unproven:
            warn(f"allow_unproven_model: {examined.unproven}", UnprovenModelWarning)
        else:
            warn_of_other_version()
        parts.written = find_written(parts, examined.trial)
        return examined

    def _chunked_path(self, parts: ModelParts) -> ChunkedPath | None:
        """Return the path that computes the loss from hidden states in chunks; None with ``head="whole"``.

        Return None, with a warning unless the model is a classifier, if its loss is not computed in chunks.
        """
        if self.head == "whole":
            return None
        path = find_chunked_path(parts)
        if isinstance(path, ChunkedPath):
            return path
        if not parts.classifies:
            warn(
                f"{type(parts.model).__name__}: head='whole' is used, with all logits at once, because {path}; "
                "set head='whole' to choose it yourself",
                HeadWarning,
            )
        return None

    @property
    def _on_accelerator(self) -> bool:
        """True if blocks compute on an accelerator. The device need not be open yet."""
        if isinstance(self.device, str):
            return self.device.partition(":")[0] not in ("cpu", "simulated")
        return self.device.torch_device.type != "cpu"

    def attach(self, examined: Examined, store: Store, before: Store | None = None) -> Any:
        """Open the device, and attach the model to it.

        ``before``: the model's store when it was attached to this device before.
        """
        parts = examined.parts
        device = open_device(self.device, self.device_memory)
        # First, because streams and the scratch memory of transfers and libraries take device memory, which
        # `spare_bytes` must not promise.
        device.open_streams()
        on_host = device.torch_device.type == "cpu"
        dtype = self.compute_dtype or (torch.float32 if on_host else store.precision.weight_dtype)
        path = self._chunked_path(parts)
        trunk = parts.trunks()[-1] if path is None else path.trunk
        chosen: dict[str, Any] = {
            "head": "whole" if path is None else "chunked",
            "head_chunk_tokens": self.head_chunk_tokens
            or head_chunk_tokens(device.spare_bytes(), parts.sizes().vocabulary),
            # Compiled code has no place between a block and its tiles.
            "compile": self._on_accelerator and self.expert_tile is None
            if self.compile == "auto"
            else bool(self.compile),
        }
        options = EngineOptions(
            **StreamingOptions.of(self) | self._residency(parts.num_blocks, device) | chosen,
            compute_dtype=dtype,
            # Where memory is not planned, nobody needs the trial run of the head on the meta device.
            head_peak=None
            if device.spare_bytes() is None
            else head_peak(parts, trunk, dtype, chunked=path is not None),
            check_recompute=self.check_recompute,
        )
        model = attach(parts, store, device, options, path, examined.takes_images, before, self.device_mesh)
        if self.check_gradients:
            model._horizon.check_gradients(self.check_gradients)
        # Weakly, because `renew` is kept by the object that it refers to.
        horizon = weakref.ref(model._horizon)
        model._horizon.renew = lambda: self._renew(horizon())
        return model

    def _renew(self, horizon: ModelForward | None) -> None:
        """Attach a model again if PEFT has changed its adapters. Leave other changes to the checks of the forward pass."""
        # After a failure of the device, weights can still be read and saved, but nothing is attached to it.
        if horizon is None or horizon.engine.device_lost or not are_adapters_changed(horizon):
            return
        engine = horizon.engine
        again = replace(
            self,
            # The open device: `open_device` returns it as it is.
            device=engine.device,
            device_micro_batch_size=engine.options.device_micro_batch_size,
            check_gradients=0,
        )
        with outside_inference_mode():
            attach_again(horizon, again.examine, again.get_precision, partial(again.attach, before=engine.store))

    def _residency(self, num_blocks: int, device: Device) -> dict[str, Any]:
        """Return the options of the residency that the arguments fix; none if the engine plans it for each batch size.

        It plans what nobody has chosen, on a device whose memory is limited: elsewhere all checkpoints can stay on the device.
        """
        is_chosen = self.resident_blocks is not None or self.resident_graphs is not None
        if self.activation_checkpoints == "auto" and not is_chosen and device.spare_bytes() is not None:
            return {}
        return Residency(*self.requested_residency(num_blocks, auto_on_device=True)).options()


def device_of(device: str | Device) -> torch.device | None:
    """Return the device of the buffers, with its index; None for host memory."""
    if not isinstance(device, str):
        return None if device.torch_device.type == "cpu" else device.torch_device
    # Without CUDA, `open_device` raises the error that says so.
    if device.partition(":")[0] != "cuda" or not torch.cuda.is_available():
        return None
    index = torch.device(device).index
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def open_device(device: str | Device, capacity: int | None = None) -> Device:
    """Open a device by its name; return a device that is already open.

    Raises:
        ConfigError: the name is unknown, or the device is not available.
    """
    if not isinstance(device, str):
        return device
    if device == "cpu":
        return CpuDevice(capacity)
    if device == "simulated":
        return SimulatedDevice(capacity=capacity)
    if device.partition(":")[0] == "cuda":
        from horizon_lm.device.cuda import CudaDevice

        return CudaDevice(device, capacity)
    raise ConfigError(f"device is {device!r}; choose 'cpu', 'cuda' or 'simulated'")
