"""Horizon-LM: train large language models whose weights stay in host RAM; the GPU holds a few buffers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from horizon_lm import errors
from horizon_lm.common.optimizers import OPTIMIZERS
from horizon_lm.errors import (
    CheckpointWarning,
    ConfigError,
    DataError,
    DeviceFaultError,
    DeviceMemoryError,
    DisagreementError,
    DoesNotFitError,
    ForeignWriteWarning,
    GradientMismatchError,
    HeadWarning,
    HorizonError,
    IgnoredArgumentWarning,
    IgnoredCastWarning,
    ImagesNotSupportedError,
    InterruptedRunError,
    MissingLogitsError,
    MissingQuantStateError,
    ModelNotSupportedError,
    NonFiniteError,
    NonFiniteWarning,
    PageLockWarning,
    PartialUpdateError,
    QuantizedWeightsError,
    RankLostError,
    RecomputeMismatchError,
    ScheduleMismatchError,
    SlowProductsWarning,
    StreamingError,
    SummedLossWarning,
    TokenError,
    UnprovenModelWarning,
    WholeTowerWarning,
)

if TYPE_CHECKING:
    from horizon_lm.engine.calls.token_logprobs import token_logprobs
    from horizon_lm.engine.opening.loading import from_config, from_pretrained, stream
    from horizon_lm.engine.opening.streamed_model import named_weights, stats, synchronize
    from horizon_lm.engine.passes.lockstep import run_together
    from horizon_lm.integrations.trainer import trainer
    from horizon_lm.integrations.trainer_plan import plan
    from horizon_lm.optim.adamw import AdamW
    from horizon_lm.optim.lion import Lion
    from horizon_lm.optim.muon import Muon
    from horizon_lm.runs.checkpoints.checkpoint import load_checkpoint, save_checkpoint
    from horizon_lm.runs.checkpoints.export import export_checkpoint
    from horizon_lm.runs.config import DatasetConfig, DpoConfig, PretrainConfig, RunConfig, SftConfig
    from horizon_lm.runs.training.train import train
    from horizon_lm.tools.merge import merge_adapter

__version__ = "0.1.0"

_HOME = {
    **{each.name: each.module for each in OPTIMIZERS.values()},
    "DatasetConfig": "horizon_lm.runs.config",
    "DpoConfig": "horizon_lm.runs.config",
    "PretrainConfig": "horizon_lm.runs.config",
    "RunConfig": "horizon_lm.runs.config",
    "SftConfig": "horizon_lm.runs.config",
    "export_checkpoint": "horizon_lm.runs.checkpoints.export",
    "merge_adapter": "horizon_lm.tools.merge",
    "from_config": "horizon_lm.engine.opening.loading",
    "from_pretrained": "horizon_lm.engine.opening.loading",
    "load_checkpoint": "horizon_lm.runs.checkpoints.checkpoint",
    "named_weights": "horizon_lm.engine.opening.streamed_model",
    "plan": "horizon_lm.integrations.trainer_plan",
    "run_together": "horizon_lm.engine.passes.lockstep",
    "save_checkpoint": "horizon_lm.runs.checkpoints.checkpoint",
    "stats": "horizon_lm.engine.opening.streamed_model",
    "stream": "horizon_lm.engine.opening.loading",
    "synchronize": "horizon_lm.engine.opening.streamed_model",
    "token_logprobs": "horizon_lm.engine.calls.token_logprobs",
    "train": "horizon_lm.runs.training.train",
    "trainer": "horizon_lm.integrations.trainer",
}
__all__ = [
    "AdamW",
    "CheckpointWarning",
    "ConfigError",
    "DataError",
    "DatasetConfig",
    "DeviceFaultError",
    "DeviceMemoryError",
    "DisagreementError",
    "DoesNotFitError",
    "DpoConfig",
    "ForeignWriteWarning",
    "GradientMismatchError",
    "HeadWarning",
    "HorizonError",
    "IgnoredArgumentWarning",
    "IgnoredCastWarning",
    "ImagesNotSupportedError",
    "InterruptedRunError",
    "Lion",
    "MissingLogitsError",
    "MissingQuantStateError",
    "ModelNotSupportedError",
    "Muon",
    "NonFiniteError",
    "NonFiniteWarning",
    "PageLockWarning",
    "PartialUpdateError",
    "PretrainConfig",
    "QuantizedWeightsError",
    "RankLostError",
    "RecomputeMismatchError",
    "RunConfig",
    "ScheduleMismatchError",
    "SftConfig",
    "SlowProductsWarning",
    "StreamingError",
    "SummedLossWarning",
    "TokenError",
    "UnprovenModelWarning",
    "WholeTowerWarning",
    "__version__",
    "errors",
    "export_checkpoint",
    "from_config",
    "from_pretrained",
    "load_checkpoint",
    "merge_adapter",
    "named_weights",
    "plan",
    "run_together",
    "save_checkpoint",
    "stats",
    "stream",
    "synchronize",
    "token_logprobs",
    "train",
    "trainer",
]  # fmt: skip


def __dir__() -> list[str]:
    """Return the public names, for ``dir()`` and completion in editors."""
    return sorted({*__all__, *_HOME})


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because importing torch and transformers takes seconds, even for ``horizon-lm --help``."""
    if name not in _HOME:
        raise AttributeError(f"module 'horizon_lm' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
