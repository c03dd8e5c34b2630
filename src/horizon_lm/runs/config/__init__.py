"""Define the settings of a run as one flat schema, from which help, documentation and run-file comments are generated.

Settings that also exist in TRL 1.x or transformers 5 keep their meaning and default; the names of all others are new.
"""

from horizon_lm.runs.config.datasets import DatasetConfig
from horizon_lm.runs.config.rules import WITHOUT_ROWS
from horizon_lm.runs.config.run import SCHEMAS, DpoConfig, PretrainConfig, RunConfig, SftConfig, TextConfig, plan_config

__all__ = [
    "SCHEMAS", "WITHOUT_ROWS", "DatasetConfig", "DpoConfig", "PretrainConfig", "RunConfig", "SftConfig", "TextConfig",
    "plan_config",
]  # fmt: skip
