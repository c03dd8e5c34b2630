"""Reject absurd sizes in the config of a model before anything of that size is made."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from horizon_lm.common.paths import require_small_text
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.model.folder import no_model_remedy

_MAX_LAYERS = 2_048  # published models have up to 200
_MAX_PARTS = 16_384  # heads of a layer, or experts; published models have up to 512
_MAX_LABELS = 2**16  # classes, each of which gets a name; published models have up to 21,843
_MAX_WIDTH = 2**26  # elements along an axis of a weight; published models have up to 2**20
_MAX_PARAMETERS = 100_000  # tensors with a name; published models have up to 70,000
_MAX_BUFFER = 2**31  # elements that are computed while a model is built
_LIMITS = (
    (re.compile(r"(layers?|blocks?|depth|stages)(_count)?$"), _MAX_LAYERS),
    (re.compile(r"(heads?|experts?)(_count)?$"), _MAX_PARTS),
    (re.compile(r"labels$"), _MAX_LABELS),
    (re.compile(r"(size|dim|dims|rank|embd|width|inner)$"), _MAX_WIDTH),
)


_MAX_EDGE = 4_096  # pixels along an edge; published processors scale to up to 2,048
_PROCESSOR_LIMITS = (  # by the end of a setting's name: its smallest and its largest value; what is allocated is a product of several
    (re.compile(r"(edge|height|width|size)$"), 1, _MAX_EDGE),
    (re.compile(r"pixels$"), 0, 2**26),  # published processors have up to 2**24
    (re.compile(r"(patches|tiles|crops|splits)$"), 0, 4_096),  # published processors have up to 2,048
    (re.compile(r"(tokens|length|seq_len)$"), 0, 2**16),
)


def require_sane_config(path: Path) -> None:
    """Raise ConfigError if a ``config.json`` is missing or no JSON object, has a size that no model has, or names no type of model."""
    if not path.is_file():
        raise ConfigError(f"{path.parent}: no usable config.json (there is none){no_model_remedy(path.parent)}")
    content = read_settings(path)
    require_sane_sizes(content, path)
    if "model_type" not in content and "auto_map" not in content:
        raise ConfigError(f"{path.parent}: no usable config.json (it has no model_type); download it again")


def read_settings(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise ConfigError if there is none, or it is too large."""
    require_small_text(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({first_line(error)}); download it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no JSON object; download it again")
    return content


def require_sane_sizes(content: Mapping[str, Any], place: Path) -> None:
    """Raise ConfigError, naming ``place``, if a setting of a model is a size that no model has."""
    for name, value in _whole_numbers(content):
        limit = next((limit for pattern, limit in _LIMITS if pattern.search(name)), None)
        if limit is not None and value > limit:
            raise ConfigError(f"{place}: {name} is {value:,}, more than the {limit:,} that are supported; correct it")


def require_sane_processor(path: Path) -> None:
    """Raise ConfigError if the file of a processor of images cannot be read, or has a size to which no processor scales images."""
    for name, kind, value in _processor_numbers(read_settings(path)):
        limits = next(((low, high) for pattern, low, high in _PROCESSOR_LIMITS if pattern.search(kind)), None)
        if limits is not None and not limits[0] <= value <= limits[1]:  # also rejects NaN, which is in no range
            raise ConfigError(f"{path}: {name} is {value:,}, but must be from {limits[0]} to {limits[1]:,}; correct it")


def _processor_numbers(settings: Any, name: str = "", kind: str = "") -> Iterator[tuple[str, str, float]]:
    """Yield all numbers in nested settings of a processor, each with its name, and the name that says what it counts."""
    if isinstance(settings, list):
        for each in settings:
            yield from _processor_numbers(each, name, kind)
    elif isinstance(settings, Mapping):
        longest = settings.get("longest_edge")
        counts_pixels = isinstance(longest, int | float) and longest > _MAX_EDGE  # as Qwen-VL's edges do
        for key, each in settings.items():
            edge = str(key).endswith("_edge")
            yield from _processor_numbers(each, str(key), "pixels" if edge and counts_pixels else str(key))
    elif isinstance(settings, int | float) and not isinstance(settings, bool):
        yield name, kind, settings


def _whole_numbers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield all whole numbers in nested settings, each with its name in lower case."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _whole_numbers(each, str(key).lower())
    elif isinstance(value, list):
        for each in value:
            yield from _whole_numbers(each, name)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield name, value


def require_few_parameters(number: int) -> None:
    """Raise ConfigError if a model that is being built has more parameters, counted by name, than any model has."""
    if number > _MAX_PARAMETERS:
        raise ConfigError(
            f"more than {_MAX_PARAMETERS:,} tensors of weights; correct the sizes in the config of the model"
        )


def require_small_buffer(sizes: Iterable[Any]) -> None:
    """Raise ConfigError if a model that is being built computes a huge tensor.

    Args:
        sizes: arguments of the torch function that makes the tensor; its sizes are the whole numbers among them.
    """
    elements = num_elements(sizes)
    if elements > _MAX_BUFFER:
        raise ConfigError(
            f"a table of {elements:,} elements would be computed to build the model; correct the sizes in its config"
        )


def num_elements(sizes: Iterable[Any]) -> int:
    """Return the number of elements of a tensor that a torch function makes of these arguments: the product of the sizes in them."""
    flat = [each for size in sizes for each in (size if isinstance(size, tuple | list) else [size])]
    return math.prod(each for each in flat if isinstance(each, int) and each > 0)
