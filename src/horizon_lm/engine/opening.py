"""Making a model streamed: one that is built already, one from a folder or hub id, one from a config."""

from typing import Any

import torch

from horizon_lm.device.base import Device
from horizon_lm.device.cpu import CpuDevice
from horizon_lm.engine.engine import Options
from horizon_lm.engine.streamed import attach
from horizon_lm.errors import ConfigError
from horizon_lm.model import capture
from horizon_lm.model.parts import ModelParts, ParamRef, find_parts
from horizon_lm.store.precision import Precision, get_precision
from horizon_lm.store.store import Store


def stream(
    model: Any,
    device: str | Device = "cpu",
    precision: str = "fp32_master",
    device_micro_batch_size: int | None = None,
    head: str = "chunked",
    *,
    boundaries: str = "device",
    head_chunk_tokens: int | None = None,
    compute_dtype: torch.dtype | None = None,
    device_memory: int | None = None,
    check_recompute: bool = False,
) -> Any:
    capture.install_hooks(model)
    parts = find_parts(model)
    mode = get_precision(precision)
    store = Store(_shapes(parts), mode)
    for refs in parts.units.values():
        for ref in refs:
            _move_in(ref, store)
    target = open_device(device, device_memory)
    options = _options(mode, target, device_micro_batch_size, head, boundaries, head_chunk_tokens, compute_dtype, check_recompute)
    return attach(parts, store, target, options)


def _shapes(parts: ModelParts) -> dict[str, dict[str, torch.Size]]:
    return {unit: {ref.name: ref.param.shape for ref in refs} for unit, refs in parts.units.items()}


def _move_in(ref: ParamRef, store: Store) -> None:
    """Copy a parameter into its slab and re-point it, which frees what it pointed to before."""
    store.source_dtypes[ref.name] = ref.param.dtype
    store.write(ref.name, ref.param.data)
    ref.param.data = store.weight(ref.name)


def _options(mode: Precision, device: Device, micro: int | None, head: str, boundaries: str, chunk: int | None, dtype: torch.dtype | None, check: bool) -> Options:
    if micro is not None and micro < 1:
        raise ConfigError(f"device_micro_batch_size is {micro}; it must be at least 1, or unset for the whole batch")
    if head not in ("whole", "chunked"):
        raise ConfigError(f"head is {head!r}; choose 'whole' or 'chunked'")
    if boundaries not in ("device", "host"):
        raise ConfigError(f"boundaries is {boundaries!r}; choose 'device' or 'host'")
    if dtype is None:
        dtype = torch.float32 if device.torch_device.type == "cpu" else mode.weight_dtype
    return Options(dtype, micro, head, chunk, boundaries, check)


def open_device(device: str | Device, capacity: int | None = None) -> Device:
    """The device of that name; one that is already open is returned as it is."""
    if not isinstance(device, str):
        return device
    if device == "cpu":
        return CpuDevice(capacity)
    raise ConfigError(f"device {device!r}")
