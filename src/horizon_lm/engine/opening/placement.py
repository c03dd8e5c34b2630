"""``device_map`` and ``max_memory`` of transformers' ``from_pretrained``, as the device of a streamed model and its memory.

Plain weights are placed on devices. Those of a streamed model lie in host memory and one device computes with them, so a map to
anywhere or to host memory changes nothing, a map to one other device names the one that computes, and several have no meaning.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch

from horizon_lm.common.quantities import parse_bytes
from horizon_lm.engine.opening.options import device_of
from horizon_lm.errors import ConfigError, IgnoredArgumentWarning, warn

_ANYWHERE = ("auto", "balanced", "balanced_low_0", "sequential")
# Keys of ``max_memory`` that are kept as they are, since they name no GPU; the empty one is the whole model.
_NOT_GPUS = ("", "cpu", "disk", "mps")


def settle_placement(options: dict[str, Any]) -> bool:
    """Remove ``device_map`` and ``max_memory`` from the options, and set ``device`` and ``device_memory`` by them.

    Return whether there is a map, and it lets transformers choose the devices.

    Raises:
        ConfigError: an argument is invalid, names several devices, or contradicts ``device``.
    """
    device = options.get("device", "auto")
    device_map, max_memory = options.pop("device_map", None), options.pop("max_memory", None)
    named = _read_map(device_map)
    if named is not None and named.type != "cpu":
        options["device"] = device = _more_precise(device, named, device_map)
    limit = None if max_memory is None else _read_limit(max_memory, device)
    if limit is not None and options.get("device_memory") is None:
        options["device_memory"] = limit
    return device_map is not None and named is None


def _read_map(device_map: Any) -> torch.device | None:
    """Return the only device of a map; None without a map, or if it lets transformers choose. Reject a map to several devices."""
    if device_map is None or (isinstance(device_map, str) and device_map in _ANYWHERE):
        return None
    places = list(device_map.values()) if isinstance(device_map, Mapping) else [device_map]
    found = {_read_device(place) for place in places}
    device = found.pop() if len(found) == 1 else None
    if device is None or device.type == "meta":
        raise ConfigError(
            f"from_pretrained: device_map={device_map!r} is not supported by a streamed model: its weights stay in host memory, and one "
            "device computes with them; name that device, or use device_map='auto'"
        )
    return device


def _read_device(place: Any) -> torch.device | None:
    """Return the device that one entry names as in transformers, where a number is a GPU; None if it names none."""
    if isinstance(place, int) and not isinstance(place, bool):
        return torch.device("cuda", place) if place >= 0 else None
    if place == "cuda" and "LOCAL_RANK" in os.environ:
        place = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        return torch.device(place) if isinstance(place, str | torch.device) else None
    except RuntimeError:  # such as for "disk"
        return None


def _more_precise(device: Any, named: torch.device, device_map: Any) -> Any:
    """Return ``device``, or ``named`` by the map if it is more precise; raise ConfigError if they are different devices."""
    if device == "auto":
        return str(named)
    given = _torch_device(device)
    if given.type == named.type:
        if named.index is None or given.index == named.index:
            return device
        if given.index is None:
            return str(named)
    raise ConfigError(
        f"from_pretrained: device={str(device)!r} and device_map={device_map!r} name different devices; leave one of them out"
    )


def _torch_device(device: Any) -> torch.device:
    """Return the device of the argument ``device``. A wrong name is reported where devices are opened."""
    if not isinstance(device, str):
        return device.torch_device  # type: ignore[no-any-return]
    return _read_device(device) or torch.device("cpu")  # such as for "simulated"


def _read_limit(max_memory: Any, device: Any) -> int | None:
    """Return the bytes to which ``max_memory`` limits the device that computes; None if it does not mention it."""
    try:
        limits = {_device_name(key): _num_bytes(value) for key, value in max_memory.items()}
    except (AttributeError, TypeError, ValueError, ConfigError) as error:
        raise ConfigError(
            f"from_pretrained: max_memory={max_memory!r} is not supported by a streamed model: write {{0: '20GiB'}} for the first GPU, "
            "or device_memory, which limits the bytes on the device"
        ) from error
    if "cpu" in limits:
        warn(
            "from_pretrained: max_memory['cpu'] has no effect on a streamed model: all of its weights, gradients and moments are in "
            "host memory; horizon-lm plan says how much they take",
            IgnoredArgumentWarning,
        )
    if device == "auto" and torch.cuda.is_available():
        device = "cuda"
    on_device = None if device == "auto" else device_of(device)
    if on_device is None:
        return None
    return limits.get(str(on_device), limits.get(""))


def _device_name(key: Any) -> str:
    """Return a key of ``max_memory`` as the name of its device, such as ``cuda:0`` for 0; raise ValueError if it names none."""
    if key in _NOT_GPUS:
        return str(key)
    device = _read_device(key)
    if device is None:
        raise ValueError(key)
    return str(device)


def _num_bytes(value: Any) -> int:
    """Return a limit in bytes; raise TypeError for a number that is not whole, or for None."""
    if isinstance(value, float) or value is None:
        raise TypeError(value)
    return parse_bytes(value)
