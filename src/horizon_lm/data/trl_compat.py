"""What is TRL's and not ours: packing, the templates that it trains with, and the prompt that two answers share."""

from typing import Any

from horizon_lm.errors import ConfigError


def is_there() -> bool:
    """Whether TRL is installed."""
    from importlib.util import find_spec

    return find_spec("trl") is not None


def _need(what: str) -> None:
    if not is_there():
        raise ConfigError(
            f"{what} needs TRL, which is not installed: pip install trl, or Horizon-LM with its extra post-training"
        )


def extract_prompt(pair: dict[str, Any]) -> dict[str, Any]:
    """The beginning that ``chosen`` and ``rejected`` share, as ``prompt``, and what follows it in each."""
    _need("a preference without a prompt")
    from trl.data_utils import extract_prompt as extract

    found: dict[str, Any] = extract(pair)
    return found


def training_template(tokenizer: Any) -> str | None:
    """TRL's version with generation marks of a tokenizer's template, if that is one that it knows."""
    if not is_there():
        return None
    from jinja2 import TemplateError
    from trl.chat_template_utils import get_training_chat_template

    try:
        template: str | None = get_training_chat_template(tokenizer)
    except (ValueError, TypeError, TemplateError):  # not a known one
        return None
    return template


def pack(table: Any, length: int, strategy: str, **map_options: Any) -> Any:
    """Rows of a `datasets.Dataset`, all of whose columns are lists, joined into rows of at most ``length``.

    Returns:
        A dataset with the same columns; but for ``wrapped``, with ``seq_lengths``, too: tokens of each row in a row.
    """
    _need("packing")
    from trl.data_utils import pack_dataset

    return pack_dataset(table, length, strategy, map_options)


def version() -> str | None:
    """Of TRL; None where it is not installed."""
    from importlib.metadata import version

    return version("trl") if is_there() else None
