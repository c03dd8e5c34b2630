"""The rules of settings: what each one needs."""

from typing import Annotated, Any

import pytest
from pydantic import Field, ValidationError

from horizon_lm.config import SCHEMAS, DatasetConfig, RunConfig
from horizon_lm.config.rules import Needs, UnusedError
from horizon_lm.config.types import Settings


def misplaced(schema: type[Settings]) -> list[str]:
    """Return the settings that need one that is not declared before them, whose value would not be known."""
    names = list(schema.model_fields)
    return [
        name
        for index, (name, field) in enumerate(schema.model_fields.items())
        for rule in field.metadata
        if isinstance(rule, Needs) and not rule.others.keys() <= {*names[:index]}
    ]


@pytest.mark.parametrize("schema", [*SCHEMAS.values(), DatasetConfig])
def test_settings_need_earlier_ones(schema: type[Settings]) -> None:
    assert misplaced(schema) == []


class Misplaced(Settings):
    early: Annotated[int, Needs(late=1)] = 0
    late: int = 0
    unknown: Annotated[int, Needs(lat=1)] = 0


def test_settings_that_need_later_or_unknown_ones_are_found() -> None:
    assert misplaced(Misplaced) == ["early", "unknown"]


class Example(Settings):
    kind: str = "plain"
    words: list[str] = Field(["none"])
    path: str | None = None
    size: Annotated[int, Field(lt=9), Needs(kind=("fast", "exact"))] = 1
    depth: Annotated[int, Needs(kind="plain")] = 1
    color: Annotated[int, Needs(words="color")] = 1
    other: Annotated[int, Needs(path=None)] = 1
    either: Annotated[bool, Needs(path=..., words=...)] = True


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 2}, "is not used without kind: fast or exact; set it, or remove this"),
        ({"kind": "fast", "depth": 2}, "is not used with kind: fast; remove one of the two"),
        ({"words": ["bold"], "color": 2}, "is not used without words: color; set it, or remove this"),
        ({"path": "a", "other": 2}, "is not used with path: a; remove one of the two"),
        ({"either": False}, "is not used without path or words; set one, or remove this"),
    ],
)
def test_settings_that_are_not_used_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Example(**settings)
    (error,) = caught.value.errors()
    assert isinstance(error["ctx"]["error"], UnusedError)
    assert str(error["ctx"]["error"]) == message


@pytest.mark.parametrize(
    "settings",
    [
        {"size": 2, "kind": "exact"}, {"depth": 2}, {"words": ["bold", "color"], "color": 2}, {"other": 2}, {"either": False, "path": "a"},
        {"either": False, "words": []}, {"size": 1},
    ],
)  # fmt: skip
def test_settings_that_are_used_are_accepted(settings: dict[str, Any]) -> None:
    assert Example(**settings).model_dump(include=set(settings)) == settings


def test_an_invalid_setting_is_the_only_error() -> None:
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({"model_name_or_path": "m", "datasets": "o/d", "use_peft": "yes", "lora_r": 4})
    assert [error["loc"] for error in caught.value.errors()] == [("use_peft",)]
