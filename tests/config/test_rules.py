"""The rules of settings: which ones a run may be resumed with, which may differ between machines, and what each one needs."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field, ValidationError

from horizon_lm.errors import ConfigError
from horizon_lm.runs.checkpoints.manifest import Manifest
from horizon_lm.runs.config import SCHEMAS, DatasetConfig, RunConfig, plan_config
from horizon_lm.runs.config.rules import Needs, NeedsEvenByDefault, OnResume, PerMachine, Reading, UnusedError
from horizon_lm.runs.config.run import settings_with
from horizon_lm.runs.config.types import Settings
from horizon_lm.runs.training.resume import ResumePoint, apply_settings, choice_warnings, settings_of

EXPECTED: dict[OnResume | None, set[str]] = {
    OnResume.FREE: {"output_dir", "datasets", "save_steps", "resident_blocks", "eval_packing", "precompute_ref_batch_size"},
    OnResume.ROUNDING: {"device", "head", "compile", "per_device_train_batch_size", "attn_implementation"},
    OnResume.STATE: {"precision", "moments", "optim", "trainable", "freeze_vision_tower", "lora_r", "lora_target_modules", "use_dora"},
    None: {"objective", "seed", "max_length", "learning_rate", "lora_alpha", "beta", "train_on"},
}  # fmt: skip
ALL = sorted({(name, rule) for rule, names in EXPECTED.items() for name in names}, key=str)
SETTINGS = [(objective, name) for objective, schema in SCHEMAS.items() for name in schema.model_fields]


@pytest.mark.parametrize(("name", "rule"), ALL)
def test_settings_have_the_rule_that_their_meaning_asks_for(name: str, rule: OnResume | None) -> None:
    assert [each for each in OnResume if name in settings_with(each)] == ([] if rule is None else [rule])


def rules_of(schema: type[Settings], name: str) -> list[OnResume]:
    return [rule for rule in schema.model_fields[name].metadata if isinstance(rule, OnResume)]


def test_each_setting_has_one_rule_of_resuming() -> None:
    """A setting is the same in all objectives, and FREE, ROUNDING, STATE or fixed."""
    names = [name for rule in OnResume for name in settings_with(rule)]
    assert len(names) == len(set(names))
    for _, name in SETTINGS:
        found = [rules_of(schema, name) for schema in SCHEMAS.values() if name in schema.model_fields]
        assert found.count(found[0]) == len(found)


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize(("objective", "name"), SETTINGS)
def test_another_value_on_resume_does_what_the_rule_says(objective: str, name: str, allowed: bool) -> None:
    """Also with `resume_with_changes`, which allows what needs no other state."""
    config = plan_config(objective=objective, model_name_or_path="m", resume_with_changes=allowed)
    settled = settings_of(config)
    given = settled | {name: 2 * settled[name] if name in ROWS else "another value"}
    rules = rules_of(SCHEMAS[objective], name)
    if rules == [OnResume.STATE]:
        settled = given
    state = {"config": given, "settled": settled, "rows_per_step": config.rows_per_step}
    point = ResumePoint(Path("checkpoint-1"), Manifest(1, "bf16", None, {}, {}, []), state)
    if not rules and allowed:
        _, (line,) = apply_settings(config, point)
        assert f"the run differs from an uninterrupted one: {name}: another value -> " in line
        return
    if rules in ([], [OnResume.STATE]):
        with pytest.raises(ConfigError, match=f"these have changed: {name}: another value -> ") as caught:
            apply_settings(config, point)
        assert ("resume_with_changes" in str(caught.value)) == (not rules)
        return
    _, lines = apply_settings(config, point)
    assert [f"resume: warning: {name}: " in line for line in lines] == ([True] if rules == [OnResume.ROUNDING] else [])


@pytest.mark.parametrize("name", ["head_chunk_tokens", "moments"])
def test_a_checkpoint_may_be_older_than_a_setting_that_the_plan_chooses(name: str) -> None:
    config = plan_config(objective="sft", model_name_or_path="m")
    saved = {each: value for each, value in settings_of(config).items() if each != name}
    state = {"config": saved, "settled": saved, "rows_per_step": config.rows_per_step}
    point = ResumePoint(Path("checkpoint-1"), Manifest(1, "bf16", None, {}, {}, []), state)
    assert apply_settings(config, point) == (config, [])
    assert choice_warnings(point, config, config) == []


ROWS = ("per_device_train_batch_size", "gradient_accumulation_steps")  # which are numbers, whose product is looked at


def test_places_may_differ_between_machines() -> None:
    found = settings_with(PerMachine())
    assert found >= {"output_dir", "model_name_or_path", "adapter_name_or_path", "datasets", "device", "host_memory"}
    assert not found & {"seed", "learning_rate", "precision", "max_steps", "per_device_train_batch_size", "save_steps"}


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
    deep: Annotated[bool, Needs(kind=("plain", "exact"), words=...)] = False
    both: Annotated[bool, Needs(kind="plain", path=None)] = False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 2}, "is not used without kind: fast or exact; set it, or remove this"),
        ({"kind": "fast", "depth": 2}, "is not used with kind: fast; remove one of the two"),
        ({"words": ["bold"], "color": 2}, "is not used without words: color; set it, or remove this"),
        ({"path": "a", "other": 2}, "is not used with path: a; remove one of the two"),
        ({"either": False}, "is not used without path or words; set one, or remove this"),
        (
            {"kind": "fast", "deep": True},
            "is not used with kind: fast and without words; change one of them, or remove this",
        ),
        (
            {"kind": "fast", "path": "a", "both": True},
            "is not used with kind: fast and path: a; remove one of the settings",
        ),
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
        {"deep": True}, {"kind": "fast", "deep": True, "words": ["bold"]}, {"kind": "fast", "both": True},
    ],
)  # fmt: skip
def test_settings_that_are_used_are_accepted(settings: dict[str, Any]) -> None:
    assert Example(**settings).model_dump(include=set(settings)) == settings


def test_an_invalid_setting_is_the_only_error() -> None:
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({"model_name_or_path": "m", "datasets": "o/d", "use_peft": "yes", "lora_r": 4})
    assert [error["loc"] for error in caught.value.errors()] == [("use_peft",)]


# A default that is written without the setting that it needs


class Adapted(Settings):
    on: bool = False
    size: Annotated[int, NeedsEvenByDefault(on=True)] = 16
    places: Annotated[str | None, NeedsEvenByDefault(on=True)] = None
    quick: Annotated[bool, NeedsEvenByDefault(on=True)] = False
    harmless: Annotated[int, Needs(on=True)] = 1


@pytest.mark.parametrize(
    ("places", "is_rejected"),
    [
        ([{"size": 16}], True),
        ([{"size": 16, "on": False}], False),  # a file with all settings
        ([{"size": 16, "on": True}], False),
        ([{"size": 16}, {"on": True}], False),
        ([{"on": False}, {"size": 16}], True),  # an override of that file
        ([{"on": False, "size": 8}, {"on": True, "size": 16}], False),
        ([{"places": None}], False),
        ([{"quick": False}], False),
        ([{"harmless": 1}], False),
        ([{}], False),
    ],
    ids=str,
)
def test_a_default_that_needs_another_setting(places: list[dict[str, Any]], is_rejected: bool) -> None:
    settings = {name: value for place in places for name, value in place.items()}
    with pytest.raises(ValidationError, match="on: true") if is_rejected else nullcontext():
        Adapted.model_validate(settings, context=Reading(places=places))
