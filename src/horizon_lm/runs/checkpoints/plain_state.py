"""Turn a state into data for JSON, and back: also tuples, counters and keys that are numbers, which schedulers have and JSON lacks."""

from collections import Counter
from typing import Any

from horizon_lm.errors import ConfigError

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
