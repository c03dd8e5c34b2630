"""Translate run files of TRL, LLaMA-Factory and Axolotl; the entry point is `translate_file`.

Names, values and defaults of each trainer are data (``trl.yaml``, ``llamafactory.yaml``, ``llamafactory_v1.yaml``, ``axolotl.yaml``, and
``common.yaml`` for what they share, in `runs.config.foreign`); `settings` applies them.
"""

from horizon_lm.tools.translate.settings import Translation, translate_file

__all__ = ["Translation", "translate_file"]
