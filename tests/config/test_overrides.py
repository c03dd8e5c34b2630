"""Overrides of boolean settings on the command line."""

import pytest

from horizon_lm.errors import ConfigError
from horizon_lm.runs.config.load import parse_overrides, split_arguments


@pytest.mark.parametrize(
    ("tokens", "settings"),
    [
        (["--packing"], {"packing": True}),
        (["--packing", "--seed", "1"], {"packing": True, "seed": 1}),
        (["--trust-remote-code", "--eval_packing"], {"trust_remote_code": True, "eval_packing": True}),
        (["--packing", "false", "--seed", "1"], {"packing": False, "seed": 1}),
        (["--packing=false"], {"packing": False}),
        (["--compile"], {"compile": True}),
        (["--compile", "auto"], {"compile": "auto"}),
        (["--no_disable_dropout", "--seed", "1"], {"disable_dropout": False, "seed": 1}),
        (["--no-packing"], {"packing": False}),
    ],
)
def test_bare_flags(tokens: list[str], settings: dict[str, object]) -> None:
    assert parse_overrides(tokens) == settings


@pytest.mark.parametrize(
    ("tokens", "overrides"),
    [
        (["--packing", "run.yaml"], ["--packing"]),
        (["--packing", "run.yaml", "--seed", "1"], ["--packing", "--seed", "1"]),
        (["run.yaml", "--packing"], ["--packing"]),
        (["--packing", "true", "run.yaml"], ["--packing", "true"]),
        (["--no_packing", "run.yaml"], ["--no_packing"]),
    ],
)
def test_bare_flags_around_a_run_file(tokens: list[str], overrides: list[str]) -> None:
    assert split_arguments(tokens) == ("run.yaml", overrides)


@pytest.mark.parametrize("tokens", [["--seed"], ["--no_seed"], ["--packing_strategy"]])
def test_other_settings_need_a_value(tokens: list[str]) -> None:
    with pytest.raises(ConfigError, match="has no value"):
        parse_overrides(tokens)


def test_flag_is_given_once() -> None:
    with pytest.raises(ConfigError, match="--packing and --no_packing are both given; keep one"):
        parse_overrides(["--packing", "--no_packing"])
