"""The trackers of ``report_to``: callbacks of transformers, each of which needs a package of its own."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from horizon_lm.errors import ConfigError, first_line
from horizon_lm.runs.training.callback_state import is_tensorboard

# Modules and packages of trackers, where these have other names than the tracker. Any of its modules suffices.
_MODULES = {"azure_ml": ("azureml",), "flyte": ("flytekit",), "tensorboard": ("tensorboard", "tensorboardX")}
_PACKAGES = {"azure_ml": "azureml-sdk", "dagshub": "dagshub mlflow", "flyte": "flytekit"}


def open_trackers(report_to: str | Sequence[str]) -> list[Any]:
    """Return the callbacks of the trackers that ``report_to`` names; raise ConfigError if the package of one is not installed."""
    if report_to in ("none", ["none"]):
        return []
    require_packages(report_to)
    from transformers.integrations import get_reporting_integration_callbacks

    callbacks = []
    for callback in get_reporting_integration_callbacks("all" if report_to in ("all", ["all"]) else report_to):
        try:
            callbacks.append(callback())
        except (RuntimeError, ImportError, ValueError) as error:  # an installation that transformers does not accept
            raise ConfigError(f"report_to: {first_line(error)}") from error
    return callbacks


def require_packages(report_to: str | Sequence[str]) -> None:
    """Raise ConfigError if a tracker that ``report_to`` names has none of its modules installed."""
    for name in [report_to] if isinstance(report_to, str) else report_to:
        if name not in ("none", "all") and not any(map(find_spec, _MODULES.get(name, (name,)))):
            raise ConfigError(
                f"report_to: {name}: its package is not installed; pip install {_PACKAGES.get(name, name)}"
            )


def place_lines(callbacks: Sequence[Any]) -> Iterator[str]:
    """Yield a line about the folder of TensorBoard's events. Other trackers print their own places."""
    for each in callbacks:
        if is_tensorboard(each) and each.logging_dir is not None:
            yield f"TensorBoard's events: {each.logging_dir} (tensorboard --logdir {each.logging_dir})"
