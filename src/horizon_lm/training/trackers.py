"""The trackers of ``report_to``: callbacks of transformers, each of which needs a package of its own."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from horizon_lm.errors import ConfigError, first_line
from horizon_lm.training.callback_state import is_tensorboard

# Modules of each tracker, any of which suffices, and the name to install them by.
_PACKAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "azure_ml": (("azureml",), "azureml-sdk"),
    "clearml": (("clearml",), "clearml"),
    "codecarbon": (("codecarbon",), "codecarbon"),
    "comet_ml": (("comet_ml",), "comet_ml"),
    "dagshub": (("dagshub",), "dagshub mlflow"),
    "dvclive": (("dvclive",), "dvclive"),
    "flyte": (("flytekit",), "flytekit"),
    "mlflow": (("mlflow",), "mlflow"),
    "neptune": (("neptune",), "neptune"),
    "swanlab": (("swanlab",), "swanlab"),
    "tensorboard": (("tensorboard", "tensorboardX"), "tensorboard"),
    "trackio": (("trackio",), "trackio"),
    "wandb": (("wandb",), "wandb"),
}


def open_trackers(report_to: str | Sequence[str]) -> list[Any]:
    """Return the callbacks of the trackers that ``report_to`` names; raise ConfigError if the package of one is not installed."""
    if report_to in ("none", ["none"]):
        return []
    from transformers.integrations import get_reporting_integration_callbacks

    names = [report_to] if isinstance(report_to, str) else list(report_to)
    if names != ["all"]:
        for name in names:
            _require_package(name)
    callbacks = []
    for callback in get_reporting_integration_callbacks("all" if names == ["all"] else names):
        try:
            callbacks.append(callback())
        except (RuntimeError, ImportError, ValueError) as error:  # an installation that transformers does not accept
            raise ConfigError(f"report_to: {first_line(error)}") from error
    return callbacks


def _require_package(name: str) -> None:
    """Raise ConfigError if none of a tracker's modules is installed."""
    modules, package = _PACKAGES[name]
    if not any(map(find_spec, modules)):
        raise ConfigError(f"report_to: {name}: its package is not installed; pip install {package}")


def place_lines(callbacks: Sequence[Any]) -> Iterator[str]:
    """Yield a line about the folder of TensorBoard's events. Other trackers print their own places."""
    for each in callbacks:
        if is_tensorboard(each) and each.logging_dir is not None:
            yield f"TensorBoard's events: {each.logging_dir} (tensorboard --logdir {each.logging_dir})"
