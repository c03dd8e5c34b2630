"""Turn a state into data for JSON, and back: also tuples, counters and keys that are numbers, which schedulers have and JSON lacks;
and the states of the random generators.
"""

import base64
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from horizon_lm.errors import ConfigError, first_line

_TAG = "horizon_lm.type"
_PLAIN = (bool, int, float, str, type(None))


def to_plain(value: Any, name: str) -> Any:
    """Return a value as data for JSON.

    Args:
        value: plain values, lists, tuples, dictionaries and counters.
        name: the name of the value in the message, such as "the state of a checkpoint".

    Raises:
        ConfigError: the value has an object that is none of them.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list):
        return [to_plain(item, name) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [to_plain(item, name) for item in value]}
    if isinstance(value, dict):
        kind = "Counter" if isinstance(value, Counter) else "dict"
        if kind == "dict" and _TAG not in value and all(isinstance(key, str) for key in value):
            return {key: to_plain(item, name) for key, item in value.items()}
        return {_TAG: kind, "items": [[to_plain(key, name), to_plain(item, name)] for key, item in value.items()]}
    raise ConfigError(
        f"{name} has a {type(value).__name__}, which a checkpoint cannot hold; keep plain numbers and texts in it, or save the "
        "model alone (save_only_model)"
    )


def from_plain(value: Any) -> Any:
    """Return the value that `to_plain` has turned into data."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: from_plain(item) for key, item in value.items()}
    items = [from_plain(item) for item in value["items"]]
    if value[_TAG] == "tuple":
        return tuple(items)
    return Counter(dict(items)) if value[_TAG] == "Counter" else dict(items)


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


def require_random_state(state: Any) -> None:
    """Raise ConfigError if the states of the generators are damaged."""
    try:
        _set_host(state, random.Random(), np.random.RandomState(), torch.Generator())
        for each in state["devices"]:
            _decode(each, np.uint8)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"the saved states of the random generators are damaged: {first_line(error)}") from error


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set all generators to what `random_state` has returned. States of devices that this machine lacks are ignored."""
    _set_host(state, random, np.random, torch.default_generator)
    for index, each in enumerate(state["devices"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(torch.from_numpy(_decode(each, np.uint8)), index)


def _set_host(state: Any, python: Any, numpy: Any, generator: torch.Generator) -> None:
    """Set a generator of Python, one of numpy and one of torch to the states that a checkpoint has."""
    version, words, position = state["python"]
    python.setstate((version, tuple(map(int, _decode(words, np.uint32))), position))
    name, keys, *rest = state["numpy"]
    numpy.set_state((name, _decode(keys, np.uint32), *rest))
    generator.set_state(torch.from_numpy(_decode(state["torch"], np.uint8)))


def _encode(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _decode(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).copy()
