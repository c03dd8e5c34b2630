"""The names that can be imported from the package itself, and their defaults."""

import inspect

import pytest

import horizon_lm
from horizon_lm import errors
from horizon_lm.runs import config

ERRORS = [
    name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception | Warning)
]


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_importable_from_the_top(name: str) -> None:
    assert getattr(horizon_lm, name) is getattr(errors, name)
    assert name in dir(horizon_lm)


@pytest.mark.parametrize("name", ["SftConfig", "PretrainConfig", "DpoConfig", "RunConfig"])
def test_run_configs_are_importable_from_the_top(name: str) -> None:
    assert getattr(horizon_lm, name) is getattr(config, name)
    assert name in dir(horizon_lm)


def test_the_default_device_is_found_as_on_the_command_line() -> None:
    assert inspect.signature(horizon_lm.from_pretrained).parameters["device"].default == "auto"
