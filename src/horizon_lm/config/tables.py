"""What TRL, LLaMA-Factory and Axolotl call settings: the tables in ``translations/``."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def tables() -> dict[str, Mapping[str, Any]]:
    """The table of each trainer, by the name of its file."""
    from ruamel.yaml import YAML

    folder = files("horizon_lm.config") / "translations"
    yaml = YAML(typ="safe", pure=True)
    return {
        name: yaml.load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
        for name in ("trl", "llamafactory", "axolotl")
    }


def our_name(theirs: str) -> str | None:
    """What a setting of any of them is called here; None if it is not one that is only called otherwise."""
    return next((table["rename"][theirs] for table in tables().values() if theirs in table.get("rename", {})), None)
