"""Translate run files of TRL, LLaMA-Factory and Axolotl; the entry point is `translate_file`.

Names, values and defaults of each trainer are data (``trl.yaml``, ``llamafactory.yaml``, ``axolotl.yaml``); `settings` applies
them, `dataset_entries` translates datasets, and `unsupported` names a replacement for settings that are not supported.
"""

from horizon_lm.config.translate.settings import Translation, translate_file

__all__ = ["Translation", "translate_file"]
