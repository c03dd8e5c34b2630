"""Read the lists of datasets of other trainers, and reject what their entries have beyond ours."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from horizon_lm.config.translate.tables import LeftOut
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.paths import require_regular

_MAX_JSON_CHARS = 2**24


def read_json(path: Path) -> Any:
    """Return the content of a JSON file that a file of another trainer names.

    Raises:
        ConfigError: it cannot be read, is no JSON, or is larger than any such file.
    """
    require_regular(path)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_JSON_CHARS + 1)
        if len(text) > _MAX_JSON_CHARS:
            raise ConfigError(f"{path}: more than {_MAX_JSON_CHARS:,} characters")
        return json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({first_line(error)})") from error


def reject_unknown(where: str, theirs: Mapping[str, Any], known: Collection[str], left_out: LeftOut) -> None:
    """Reject the unknown settings of an entry, since they may change its rows."""
    for key in theirs:
        if key not in known and theirs[key] not in (None, False, *_OURS.get(key, ())):
            reason = next(
                (reason for names, reason in _REASONS.items() if key in names),
                "unknown setting, which may matter; remove it",
            )
            left_out.add(f"{where}.{key}", "rejected", reason)


_OURS = {"roles_to_train": (["assistant"], ["gpt", "assistant"]), "train_on_eos": ("turn",), "train_on_eot": ("turn",)}
"""Values of settings of Axolotl by which it trains on the tokens that we train on: its defaults."""
_REASONS = {
    ("images", "videos", "audios"): "models with pictures, videos or sound are not supported",
    ("size",): "rows would be drawn with replacement; remove it, or set max_samples in our file",
    (
        "num_samples",
        "shards",
    ): "these rows would be drawn at random; remove it, or set max_samples or fraction in our file",
    (
        "roles_to_train",
        "train_on_eos",
        "train_on_eot",
    ): "all answers of the assistant are trained on, each with its end; remove it, or set train_on in our file",
    ("kto_tag",): "use horizon_lm.trainer(KTOTrainer) in a script",
}
