"""Limit the YAML of cards, which other packages read: a kilobyte of merge keys or aliases may stand for gigabytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from horizon_lm.config.yaml_file import require_few_values
from horizon_lm.errors import DataError

_MAX_CHARS, _MAX_VALUES = 2**20, 2**18  # of a card; cards of hundreds of configs have a tenth of both


@contextmanager
def limited_cards(place: str) -> Iterator[None]:
    """Context manager: let PyYAML read only texts that stand for few values. Raise DataError, naming ``place``, for others."""
    import yaml  # of huggingface_hub

    load, found = yaml.safe_load, list[DataError]()

    def load_small(text: Any) -> Any:
        try:
            if len(text) > _MAX_CHARS:
                raise ValueError(f"it has {len(text):,} characters")
            require_few_values(yaml.parse(text, Loader=yaml.SafeLoader), _MAX_VALUES)
        except (ValueError, RecursionError) as error:
            found.append(
                DataError(
                    f"{place}: the YAML of its card is rejected ({error}); download the files of rows, and name them"
                )
            )
            raise found[0] from error
        return load(text)

    yaml.safe_load = load_small
    try:
        yield
    finally:
        yaml.safe_load = load
    if found:  # `datasets` goes on with an older copy in its cache
        raise found[0]
