"""Translate run files of TRL, LLaMA-Factory and Axolotl, with `translate_file` as the entry point.

Names, values and defaults of each trainer are data (``trl.yaml``, ``llamafactory.yaml``, ``axolotl.yaml``); `settings` applies
them, `dataset_entries` converts what they say about rows, and `unsupported` says what to write instead of a setting.
"""

from horizon_lm.config.translate.settings import Translation, translate_file

__all__ = ["Translation", "translate_file"]
