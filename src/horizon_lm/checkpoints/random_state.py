"""The states of the global random generators as plain data."""

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state(devices: bool = True) -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, on the host and, if they work, on all devices."""
    version, words, position = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    on_devices = torch.cuda.get_rng_state_all() if devices and torch.cuda.is_initialized() else []
    return {
        "python": [version, _encode(np.array(words, np.uint32)), position],
        "numpy": [name, _encode(np.asarray(keys)), *rest],
        "torch": _encode(torch.get_rng_state().numpy()),
        "devices": [_encode(state.numpy()) for state in on_devices],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set all generators to what `random_state` has returned. Devices that are missing here are left out."""
    version, words, position = state["python"]
    random.setstate((version, tuple(map(int, _decode(words, np.uint32))), position))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, _decode(keys, np.uint32), *rest))
    torch.set_rng_state(torch.from_numpy(_decode(state["torch"], np.uint8)))
    for index, each in enumerate(state["devices"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(torch.from_numpy(_decode(each, np.uint8)), index)


def _encode(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _decode(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).copy()
