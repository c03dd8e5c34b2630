"""What a run is made of: one flat schema. Its sentences are the help, the documentation and the comments in files.

A name that TRL 1.x or transformers 5 has keeps their meaning and default here; what is ours has a name of its own.
"""

from horizon_lm.config.datasets import WITHOUT_ROWS, DatasetConfig
from horizon_lm.config.run import SCHEMAS, DpoConfig, PretrainConfig, RunConfig, SftConfig, TextConfig, plan_config

__all__ = [
    "SCHEMAS", "WITHOUT_ROWS", "DatasetConfig", "DpoConfig", "PretrainConfig", "RunConfig", "SftConfig", "TextConfig",
    "plan_config",
]  # fmt: skip
