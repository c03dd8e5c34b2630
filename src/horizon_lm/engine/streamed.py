"""The way from a streamed model to its engine."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from horizon_lm.engine.calls.model_forward import ModelForward
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.errors import ConfigError


def is_streamed(model: Any) -> bool:
    """Return whether a model, or the model inside a PEFT model, is streamed."""
    # PEFT's models hand on the attributes of the model inside, so a type check would miss them.
    return hasattr(model, "_horizon")


def forward_of(model: Any, user: str = "this") -> ModelForward:
    """Return the object that runs the forward pass of a streamed model.

    Args:
        model: the model.
        user: what needs it, for the message.

    Raises:
        ConfigError: the model is not streamed.
    """
    if isinstance(model, Iterable) and not isinstance(model, nn.Module):
        raise ConfigError(f"{user} needs the streamed model itself, not its parameters")
    if not is_streamed(model):
        raise ConfigError(f"{user} needs a streamed model; call horizon_lm.stream(model) first")
    forward: ModelForward = model._horizon
    return forward


def engine_of(model: Any, user: str = "this") -> Engine:
    """Return the engine of a streamed model. Arguments and errors are those of `forward_of`."""
    return forward_of(model, user).engine
