"""Wrap the TRL functions used here: packing, training templates, and extraction of a shared prompt."""

from pathlib import Path
from typing import Any

from horizon_lm.errors import ConfigError


def is_installed() -> bool:
    """Return whether TRL is installed."""
    from importlib.util import find_spec

    return find_spec("trl") is not None


def require(feature: str) -> None:
    """Raise ConfigError if TRL is not installed; name the feature that needs it."""
    if not is_installed():
        raise ConfigError(
            f"{feature} needs TRL; install it with pip install trl, or install Horizon-LM with the extra post-training"
        )


def extract_prompt(pair: dict[str, Any]) -> dict[str, Any]:
    """Return a pair with the common start of ``chosen`` and ``rejected`` moved to ``prompt``."""
    require("a preference without a prompt")
    from trl.data_utils import extract_prompt as extract

    found: dict[str, Any] = extract(pair)
    return found


def training_template(tokenizer: Any) -> str | None:
    """Return TRL's version of a tokenizer's template with generation marks, or None if TRL does not have one."""
    if not is_installed():
        return None
    from trl.chat_template_utils import get_training_chat_template

    try:
        template: str | None = get_training_chat_template(tokenizer)
    except ConfigError:  # it exceeds a limit
        raise
    except Exception:  # TRL does not know the template, or rendering it has failed with any exception
        return None
    return template


def training_template_file(template: str) -> str | None:
    """Return the path of a training template in TRL's package, or None if TRL has it in no file."""
    from trl import chat_template_utils

    folder = Path(chat_template_utils.__file__).with_name("chat_templates")
    files = (path for path in sorted(folder.glob("*_training.jinja")) if path.read_text(encoding="utf-8") == template)
    return next(map(str, files), None)


def pack(table: Any, length: int, strategy: str, **map_options: Any) -> Any:
    """Pack the rows of a dataset into rows of at most ``length`` tokens.

    Args:
        table: a `datasets.Dataset` whose columns are lists, one entry per token.
        length: maximum number of tokens in a packed row.
        strategy: bfd, bfd_split or wrapped.
        map_options: options of `datasets.Dataset.map`.

    Returns:
        A dataset with the same columns, and except for ``wrapped`` also ``seq_lengths``, the lengths of the rows in a
        packed row.
    """
    require("packing")
    from trl.data_utils import pack_dataset

    return pack_dataset(table, length, strategy, map_options)


def version() -> str | None:
    """Return the version of TRL, or None if it is not installed."""
    from importlib.metadata import version

    return version("trl") if is_installed() else None
