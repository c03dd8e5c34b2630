"""The arguments of `horizon_lm.stream`: validate them, check the model against them, and open the device."""

from dataclasses import dataclass
from typing import Any

import torch

from horizon_lm.common.streaming_options import StreamingOptions
from horizon_lm.device.base import Device
from horizon_lm.device.cpu import CpuDevice
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.distributed.mesh import find_mesh
from horizon_lm.errors import ConfigError, ModelNotSupportedError, UnprovenModelWarning, warn
from horizon_lm.memory.precision import Precision, get_precision
from horizon_lm.model import capture
from horizon_lm.model.adapter_kinds import require_adapters_that_stream
from horizon_lm.model.examination import Examined, examine
from horizon_lm.model.float8.kernels import require_float8
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.proven import warn_of_other_version
from horizon_lm.model.routed_experts import find_divisible_experts
from horizon_lm.model.units import find_parts
from horizon_lm.planning.arithmetic.tiles import NOT_COMPILED, no_experts
from horizon_lm.planning.measure.block_probe import find_written


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
        # The dataclass is frozen because many objects hold it. `auto` is settled here, before any of them does.
        if self.device == "auto":
            object.__setattr__(self, "device", "cuda" if torch.cuda.is_available() else "cpu")
        object.__setattr__(self, "device_mesh", find_mesh(self.device_mesh, device_of(self.device)))
        # Also for the errors of `get_precision`, before a model is touched.
        stored = self.get_precision().weight_dtype
        if self.products == "float8" and self.on_accelerator:
            require_float8(device_of(self.device), self.compute_dtype or stored)
        if self.expert_tile is not None and self.compile is True:
            raise ConfigError(NOT_COMPILED)
        if isinstance(self.expert_tile, str):
            raise ConfigError(
                f"expert_tile is {self.expert_tile!r}; choose a number of experts, or None for whole blocks"
            )
        if self.check_gradients < 0:
            raise ConfigError(f"check_gradients is {self.check_gradients}; it must be a number of blocks, 0 for none")

    def get_precision(self, parts: ModelParts | None = None) -> Precision:
        """Return the formats of weights and gradients in host memory. By default gradients of adapters, which are small, are float32."""
        dtype = getattr(torch, self.grad_dtype, None) if isinstance(self.grad_dtype, str) else self.grad_dtype
        if dtype is None and self.grad_dtype is not None:
            raise ConfigError(f"grad_dtype is {self.grad_dtype!r}; choose bfloat16 or float32")
        if dtype is None and parts is not None and parts.frozen_base():
            dtype = torch.float32
        return get_precision(self.precision, dtype)

    def examine(self, model: Any) -> Examined:
        """Find the units of a model, and install hooks in it. Reject a model that cannot be streamed before any parameter is moved."""
        require_adapters_that_stream(model)
        capture.install_hooks(model)  # so that its own hooks do not count as foreign hooks later
        parts = find_parts(model)
        configs = getattr(model, "peft_config", None) or {}
        if self.device_mesh.size > 1 and any(getattr(each, "modules_to_save", None) for each in configs.values()):
            raise ModelNotSupportedError(
                "modules_to_save is not supported with several processes: PEFT reads whole copies of the modules; use one process"
            )
        examined = examine(
            parts, attn_implementation=self.attn_implementation, on_accelerator=self.on_accelerator,
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

    @property
    def on_accelerator(self) -> bool:
        """True if blocks compute on an accelerator. The device need not be open yet."""
        if isinstance(self.device, str):
            return self.device.partition(":")[0] not in ("cpu", "simulated")
        return self.device.torch_device.type != "cpu"


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
