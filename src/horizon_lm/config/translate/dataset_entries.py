"""Translate the datasets in files of TRL, LLaMA-Factory and Axolotl to entries of our ``datasets``."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horizon_lm.config.translate.axolotl_datasets import from_axolotl
from horizon_lm.config.translate.llamafactory_datasets import from_llamafactory, from_v1
from horizon_lm.config.translate.tables import LeftOut
from horizon_lm.config.translate.trl_datasets import from_trl
from horizon_lm.paths import exists


def translate_datasets(
    trainer: str, theirs: Mapping[str, Any], folder: Path, left_out: LeftOut, objective: str
) -> dict[str, Any]:
    """Return our ``datasets``, ``eval_datasets`` and the settings that follow from them.

    Args:
        trainer: name of the other trainer.
        theirs: its settings.
        folder: folder of its file.
        left_out: receives what cannot be translated.
        objective: objective of the run.

    Raises:
        ConfigError: a file that lists datasets cannot be read.
        TypeError, AttributeError, LookupError, ValueError: a setting is not in the format of the trainer.
    """
    translate = {
        "TRL": from_trl, "LLaMA-Factory": from_llamafactory, "LLaMA-Factory (v1 layout)": from_v1, "Axolotl": from_axolotl,
    }[trainer]  # fmt: skip
    found = dict(translate(theirs, folder, left_out, objective))
    for entry in [*found.get("datasets", []), *found.get("eval_datasets", [])]:
        if (entry.get("format") == "preference") != (objective == "dpo") and "format" in entry:
            left_out.add("datasets", "rejected", f"{entry['path']} has rows for another objective than {objective}")
        if "split" in entry and exists(entry["path"]) and Path(entry["path"]).expanduser().is_file():
            split = entry.pop("split")
            if first := re.fullmatch(r"train\[:(\d+)\]", split):
                entry["max_samples"] = int(first[1])
            elif split != "train":
                left_out.add("datasets.split", "rejected", f"{split}: a file has no splits; all of its rows are read")
    return found
