"""Define the settings of a run as one flat schema, the source of help, documentation and comments in run files.

Settings that TRL 1.x or transformers 5 also have keep their meaning and default; the others have names of their own.
"""

from horizon_lm.config.datasets import WITHOUT_ROWS, DatasetConfig
from horizon_lm.config.run import SCHEMAS, DpoConfig, PretrainConfig, RunConfig, SftConfig, TextConfig, plan_config

__all__ = [
    "SCHEMAS", "WITHOUT_ROWS", "DatasetConfig", "DpoConfig", "PretrainConfig", "RunConfig", "SftConfig", "TextConfig",
    "plan_config",
]  # fmt: skip
