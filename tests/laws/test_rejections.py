"""Law: every setting that is rejected is named, with its place in the run file, and every one that would be ignored is rejected."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from horizon_lm.common.optimizers import OPTIMIZERS, by_other_name
from horizon_lm.errors import ConfigError
from horizon_lm.runs.config import SCHEMAS
from horizon_lm.runs.config.load import read_run_config
from horizon_lm.runs.config.rules import Needs, NeedsEvenByDefault
from horizon_lm.runs.config.types import Settings

SETTINGS = [(objective, name) for objective, schema in SCHEMAS.items() for name in schema.model_fields]
NEEDING = [
    (objective, name, number)
    for objective, name in SETTINGS
    for number, rule in enumerate(SCHEMAS[objective].model_fields[name].metadata)
    if isinstance(rule, Needs)
]


def run_file(folder: Path, settings: dict[str, Any]) -> str:
    rows = folder / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    path = folder / "run.yaml"
    required = {"model_name_or_path": "some/model", "datasets": str(rows)}
    path.write_text(yaml.safe_dump(required | settings, sort_keys=False))
    return str(path)


def error_of(folder: Path, settings: dict[str, Any], overrides: Sequence[str] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        read_run_config(run_file(folder, settings), overrides)
    return str(caught.value)


@pytest.mark.parametrize(("objective", "name"), SETTINGS)
def test_a_wrong_value_is_named_with_its_place(tmp_path: Path, objective: str, name: str) -> None:
    for value in ("a\0b", float("inf"), [[{}]]):
        found = re.search(r"run\.yaml:(\d+):\d+: (\w+)", error_of(tmp_path, {"objective": objective} | {name: value}))
        keys = list(yaml.safe_load((tmp_path / "run.yaml").read_text()))
        assert found is not None
        assert found[2] == name
        assert int(found[1]) - keys.index(name) in (1, 2)  # an item of a list is on the next line


def candidates(field: FieldInfo) -> Iterator[Any]:
    """Yield values of a setting other than its default."""
    literals = [each for part in (field.annotation, *get_args(field.annotation)) for each in get_args(part)]
    known = TypeAdapter(Annotated[field.annotation, *field.metadata])
    for value in (*literals, True, False, 7, 0.25, 4096, *OPTIMIZERS, "x", ["x"], {"x": 1}, "steps", None):
        try:
            if not isinstance(value, type) and known.validate_python(value, strict=True) != field.default:
                yield value
        except (ValidationError, TypeError):
            continue


def without_what_it_needs(schema: type[Settings], rule: Needs) -> dict[str, Any]:
    """Return settings with which a rule is not satisfied."""
    found = {}
    for name, wanted in rule.others.items():
        field = schema.model_fields[name]
        if field.default in wanted:  # for example, head: chunked
            found[name] = next(value for value in candidates(field) if value not in wanted)
    return found


@pytest.mark.parametrize(("objective", "name", "number"), NEEDING)
def test_a_setting_that_would_be_ignored_is_rejected(tmp_path: Path, objective: str, name: str, number: int) -> None:
    """Any value but its default, without the other setting that it needs; the default, too, if somebody wants that who writes it beside
    the file.
    """
    field = SCHEMAS[objective].model_fields[name]
    rule = field.metadata[number]
    settings = {"objective": objective} | without_what_it_needs(SCHEMAS[objective], rule)
    errors = [error_of(tmp_path, settings | {name: next(candidates(field))})]
    if isinstance(rule, NeedsEvenByDefault) and field.default not in (None, False):
        errors.append(error_of(tmp_path, settings, [f"--{name}", str(field.default).lower()]))
    for error in errors:
        assert any(f"{name}: " in line and ": is not used with" in line for line in error.splitlines()), error


# Optimizers


def settings_of_some() -> dict[str, Any]:
    """Return the settings that not all optimizers use, each with a value that is not its default."""
    names = {name for entry in OPTIMIZERS.values() for name in entry.settings}
    fields = SCHEMAS["sft"].model_fields
    return {name: next(candidates(fields[name])) for name in sorted(names)}


@pytest.mark.parametrize("setting", settings_of_some())
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_setting_of_other_optimizers_is_rejected(tmp_path: Path, name: str, setting: str) -> None:
    settings = {"optim": name, "max_grad_norm": 0.0, setting: settings_of_some()[setting]}
    if setting in OPTIMIZERS[name].settings:
        assert getattr(read_run_config(run_file(tmp_path, settings)), setting) == settings[setting]
    else:
        assert f"{setting}: {str(settings[setting]).lower()}: is not used with" in error_of(tmp_path, settings)


def test_an_unknown_optimizer_is_answered_with_all_names(tmp_path: Path) -> None:
    error = error_of(tmp_path, {"optim": "rmsprop"})
    assert error.endswith(f"must be {' or '.join(OPTIMIZERS)}, or transformers' name for it")


@pytest.mark.parametrize("theirs", [alias for entry in OPTIMIZERS.values() for alias in entry.aliases])
def test_names_of_transformers_are_ours_or_answered_with_ours(tmp_path: Path, theirs: str) -> None:
    found = by_other_name(theirs)
    assert found is not None
    name, moments = found
    if moments == "float32":
        assert read_run_config(run_file(tmp_path, {"optim": theirs})).optim == name
    else:
        assert f"write optim: {name} and moments: {moments}" in error_of(tmp_path, {"optim": theirs})


# Controls


def test_right_values_are_accepted(tmp_path: Path) -> None:
    assert read_run_config(run_file(tmp_path, {"optim": "lion", "learning_rate": 0.5})).optim == "lion"


def test_every_rule_has_a_value_that_breaks_it() -> None:
    """No case above passes because there is nothing to try."""
    assert len({name for _, name, _ in NEEDING}) > 20
    for objective, name, _ in NEEDING:
        assert list(candidates(SCHEMAS[objective].model_fields[name])), name
