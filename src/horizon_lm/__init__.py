"""Horizon-LM: train large language models from host RAM, with a GPU that holds only a few buffers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horizon_lm.engine.logprobs import token_logprobs
    from horizon_lm.engine.opening import from_config, from_pretrained, stream
    from horizon_lm.engine.statistics import stats, synchronize
    from horizon_lm.optim.adamw import AdamW
    from horizon_lm.training.loop import train

__version__ = "0.1.0"
__all__ = [
    "AdamW", "__version__", "from_config", "from_pretrained", "stats", "stream", "synchronize", "token_logprobs", "train",
]  # fmt: skip

_HOME = {
    "AdamW": "horizon_lm.optim.adamw",
    "from_config": "horizon_lm.engine.opening",
    "from_pretrained": "horizon_lm.engine.opening",
    "stats": "horizon_lm.engine.statistics",
    "stream": "horizon_lm.engine.opening",
    "synchronize": "horizon_lm.engine.statistics",
    "token_logprobs": "horizon_lm.engine.logprobs",
    "train": "horizon_lm.training.loop",
}


def __dir__() -> list[str]:
    """What there is, for people and their editors."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import on first use: torch and transformers take seconds, ``horizon-lm --help`` should not."""
    if name not in _HOME:
        raise AttributeError(f"module 'horizon_lm' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
