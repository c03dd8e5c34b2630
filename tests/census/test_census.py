"""The table of proven models is right: a sample of types by default, every type with ``-m slow``."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

import horizon_lm
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model.units import find_parts
from tests.census import image_cases, opening
from tests.census.cases import CASES, FOR_IMAGES, cases_of, run_case
from tests.census.command import PAGE, TABLE
from tests.census.images import find_images
from tests.census.opening import OPENED
from tests.census.subject import Subject
from tests.census.table import FEATURES, GOOD, NEEDED, entry, is_proven, table, verdict
from tests.census.tiny_models import CannotBuildError, build, describe_model, model_types
from tests.support.thinned_cases import thinned

SAMPLE = [
    ("causal", "llama"), ("causal", "gpt2"), ("causal", "bart"), ("causal", "bert"), ("causal", "falcon_mamba"),
    ("causal", "mixtral"), ("causal", "gemma3n_text"), ("causal", "llama4_text"), ("causal", "mllama"),
    ("causal", "deepseek_v32"), ("image_text", "llava"), ("image_text", "qwen2_vl"), ("classification", "gpt_oss"),
    ("classification", "bert"),
]  # fmt: skip
QUICK = ("whole", "default", "micro_batches", "hidden_states", "generate", "adamw", "save", "images")
BAD = ("wrong", "crashed")
EVERY = [(mapping, name) for mapping in ("causal", "image_text", "classification") for name in model_types(mapping)]


def proven(mapping: str = "causal") -> dict[str, Any]:
    kind = "classifiers" if mapping == "classification" else "types"
    return json.loads(TABLE.read_text(encoding="utf-8"))[kind]


def claims(found: dict[str, Any] | None) -> set[str]:
    """Return the cases that the table claims for a type."""
    if found is None:
        return set()
    return {*NEEDED, *(case for feature, cases in FEATURES.items() if feature in found["features"] for case in cases)}


@pytest.mark.parametrize(("mapping", "model_type"), thinned(SAMPLE, every=2))
def test_claims_of_the_table_hold(mapping: str, model_type: str) -> None:
    subject = Subject(mapping, model_type)
    claimed = claims(proven(mapping).get(subject.model.config.model_type))
    outcomes = {case: run_case(subject, case) for case in QUICK if case in cases_of(mapping)}
    assert not {case: each for case, each in outcomes.items() if each.status in BAD}
    assert not {case: each for case, each in outcomes.items() if case in claimed and each.status not in GOOD}


WITH_IMAGES = [
    ("llava", "mixed_images"), ("qwen3_vl", "frozen_tower"), ("idefics3", "several_images"), ("molmo2", "image_evaluation"),
    ("minicpmv4_7", "images_in_micro_batches"), ("gemma3", "image_adamw"), ("lfm2_vl", "image_save"),
    ("kosmos-2.5", "tower_alone"), ("llava_next", "image_accumulation"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "case"), WITH_IMAGES)
def test_claims_of_the_table_hold_with_images(model_type: str, case: str) -> None:
    outcome = run_case(Subject("image_text", model_type), case)
    assert outcome.status in GOOD, outcome.detail


def test_rows_that_a_model_does_not_compute_without_images_are_not_cut() -> None:
    outcome = run_case(Subject("image_text", "blip-2"), "images_in_micro_batches")
    assert outcome.status == "rejected"
    assert "does not compute rows without pixel_values" in outcome.detail


@pytest.mark.slow
@pytest.mark.parametrize(("mapping", "model_type"), EVERY)
def test_every_type(mapping: str, model_type: str) -> None:
    subject = Subject(mapping, model_type)
    try:
        result = {"status": "built", **describe_model(subject.model), "cases": {}}
    except CannotBuildError as error:
        pytest.skip(str(error))
    for case in cases_of(mapping):
        outcome = run_case(subject, case)
        result["cases"][case] = {"status": outcome.status, "detail": outcome.detail}
    assert not {case: each for case, each in result["cases"].items() if each["status"] in BAD}
    found = proven(mapping).get(result["model_type"])
    assert is_proven(result) == (found is not None)
    if found is not None and found["class"] == result["class"]:
        assert {*entry(result)["features"]} <= {*found["features"]}


# The census itself


class Broken(Subject):
    """A subject that streams its model with one altered weight."""

    weight = "model.layers.1.mlp.up_proj.weight"

    def stream(self, **settings: Any) -> Any:
        with torch.no_grad():
            self.model.get_parameter(self.weight).mul_(1.01)
        try:
            return super().stream(**settings)
        finally:
            del self.__dict__["model"]


@pytest.mark.parametrize("case", ["whole", "default", "micro_batches", "accumulation", "evaluation", "hidden_states"])
def test_a_changed_weight_is_detected(case: str) -> None:
    assert run_case(Broken("causal", "llama"), case).status == "wrong"


class BrokenTower(Broken):
    weight = "model.vision_tower.encoder.layers.0.mlp.fc1.weight"


@pytest.mark.parametrize("case", [case for case in FOR_IMAGES if case != "image_save"])
def test_a_changed_weight_of_a_tower_is_detected(case: str) -> None:
    assert run_case(BrokenTower("image_text", "llava"), case).status == "wrong"


def test_a_weight_that_is_saved_otherwise_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def altered(subject: Subject, model: Any) -> Any:
        loaded = reload(subject, model)
        with torch.no_grad():
            loaded.get_parameter(BrokenTower.weight).mul_(1.01)
        return loaded

    reload = image_cases.reload
    monkeypatch.setattr(image_cases, "reload", altered)
    outcome = run_case(Subject("image_text", "llava"), "image_save")
    assert outcome.status == "wrong"
    assert BrokenTower.weight in outcome.detail


def test_rows_have_as_many_images_as_they_should() -> None:
    images = find_images(build("llava", "image_text"))
    batch = images.batch((0, 2))
    is_image = batch["input_ids"] == images.token
    assert is_image.sum(1).tolist() == [0, 2 * images.num_tokens]
    assert len(batch["pixel_values"]) == 2
    assert bool((batch["labels"][is_image] == -100).all())
    assert "pixel_values" not in images.batch((0, 0))


def test_moved_parameters_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject("causal", "bart")
    unused = next(name for name, grad in subject.plain.grads.items() if grad is None)
    stream = subject.stream

    def moved(**settings: Any) -> Any:
        model = stream(**settings)
        with torch.no_grad():
            model.load_state_dict(model.state_dict() | {unused: model.state_dict()[unused] + 1.0})
        return model

    monkeypatch.setattr(subject, "stream", moved)
    outcome = run_case(subject, "adamw")
    assert outcome.status == "wrong"
    assert "without a gradient moved" in outcome.detail


def test_exceptions_are_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject("causal", "llama")
    monkeypatch.setattr(subject, "stream", lambda **settings: 1 / 0)
    assert {run_case(subject, case).status for case in ("whole", "generate", "save")} == {"crashed"}


def test_tiny_models_have_every_kind_of_layer() -> None:
    model = build("qwen3_next", "causal")
    assert set(model.config.layer_types) == {"linear_attention", "full_attention"}
    assert sum(p.numel() for p in model.parameters()) < 1e6


def test_no_type_has_experts_in_a_list_of_modules() -> None:
    """They would need tiles of their own; see decision 025."""
    listed = re.compile(r"experts\w*(: [\w.]+)? = (nn\.)?ModuleList\(|class \w*Experts?\w*\((nn\.)?ModuleList\)")
    assert listed.search("        self.experts = nn.ModuleList([Expert(config) for _ in range(config.num_experts)])")
    assert listed.search("class MixtralExperts(nn.ModuleList):")
    files = [*Path(transformers.models.__path__[0]).glob("*/modeling_*.py")]
    assert len(files) > len(proven())
    assert [file.name for file in files if listed.search(file.read_text(encoding="utf-8"))] == []


def test_unknown_types_cannot_be_built() -> None:
    with pytest.raises(CannotBuildError, match="timm"):
        build("perception_lm", "image_text")


# The table


def result_of(**statuses: str) -> dict[str, Any]:
    cases = {case: {"status": statuses.get(case, "right"), "detail": "chunked: bit for bit"} for case in CASES}
    return {"status": "built", "class": "LlamaForCausalLM", "model_type": "llama", "tied": False, "cases": cases}


@pytest.mark.parametrize("case", NEEDED)
def test_one_wrong_case_is_not_proven(case: str) -> None:
    result = result_of(**{case: "wrong"})
    assert verdict(result)[0] == "wrong"
    assert table({"causal": {"llama": result}})["types"] == {}


def test_features_are_proven_one_by_one() -> None:
    result = result_of(generate="wrong", default_micro_batches="rejected", other_tie="no_such_case")
    found = table({"causal": {"llama": result}})["types"]["llama"]
    assert found["head"] == "chunked"
    assert {"hidden_states", "untied"} <= {*found["features"]}
    assert not {"generate", "micro_batches", "tied"} & {*found["features"]}


def test_the_page_and_the_table_agree() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    on_page = {(row[1].strip(), row[2].strip()) for row in rows if row[2:] and row[2].strip() in ("chunked", "whole")}
    everything = [*proven().values(), *proven("classification").values()]
    assert on_page == {(each["class"], each["head"]) for each in everything}


# Opening folders


OPENINGS = [  # types with buffers or weights that transformers keeps in float32, scales, tables of positions, and none of these
    ("causal", "deepseek_v3", "bfloat16"), ("causal", "gptj", "mixed"), ("causal", "gemma3_text", "float16"),
    ("causal", "apertus", "float32"), ("causal", "ernie4_5_moe", "mixed"), ("classification", "llama", "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("mapping", "model_type", "folder"), OPENINGS)
def test_folders_are_opened_as_by_transformers(mapping: str, model_type: str, folder: str) -> None:
    outcome = run_case(Subject(mapping, model_type), f"opened_{folder}")
    assert outcome.status in GOOD, outcome.detail


@pytest.mark.slow
@pytest.mark.parametrize(("mapping", "model_type"), [each for each in EVERY if each[0] != "image_text"])
def test_every_type_is_opened_as_by_transformers(mapping: str, model_type: str) -> None:
    subject = Subject(mapping, model_type)
    outcomes = {case: run_case(subject, case) for case in OPENED}
    assert not {case: each for case, each in outcomes.items() if each.status in BAD}


@pytest.mark.parametrize("fault", ["dtype", "value", "weight", "written"])
def test_another_opening_is_detected(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        model = from_pretrained(*arguments, **options)
        gate = model.model.layers[1].mlp.gate
        if fault == "dtype":
            gate.e_score_correction_bias = gate.e_score_correction_bias.double()
        elif fault == "value":
            gate.e_score_correction_bias.mul_(1.001)
        elif fault == "weight":
            with torch.no_grad():
                model.lm_head.weight.mul_(1.01)
        else:
            model._horizon.engine.store.source_dtypes["lm_head.weight"] = torch.float16
        return model

    from_pretrained = horizon_lm.from_pretrained
    monkeypatch.setattr(horizon_lm, "from_pretrained", broken)
    subject = opening.narrow("causal", "deepseek_v3")
    outcome = opening.opened(subject, "bfloat16", "bf16", by_run=False)
    assert outcome.status == "wrong"
    expected = {
        "dtype": "float64",
        "value": "the buffer",
        "weight": "lm_head.weight",
        "written": "is written as torch.float16",
    }
    assert expected[fault] in outcome.detail


# Directions


def sees_later_tokens(model: Any) -> bool:
    """Return whether the logits of a token depend on a later one."""
    ids = torch.arange(2, 10)[None] % model.config.get_text_config().vocab_size
    changed = ids.clone()
    changed[0, -1] = 1
    with torch.no_grad():
        logits, others = (model(input_ids=each, use_cache=False).logits[0, :-1] for each in (ids, changed))
    return bool((logits - others).abs().max() > 1e-4 * logits.abs().max())


def types_with_two_directions() -> list[str]:
    return [name for name in model_types("causal") if hasattr(CONFIG_MAPPING[name], "is_decoder")]


def check_direction(model_type: str) -> None:
    """A model that is a decoder or an encoder by a setting of its config is rejected as an encoder."""
    encoder = build(model_type, is_decoder=False).eval()
    try:
        find_parts(encoder)
        is_rejected = False
    except ModelNotSupportedError as error:
        is_rejected = "is an encoder" in str(error)
    assert is_rejected == sees_later_tokens(encoder)
    decoder = build(model_type).eval()
    assert not sees_later_tokens(decoder)


@pytest.mark.parametrize("model_type", ["bert", "rembert", "big_bird", "gpt_neox"])
def test_encoders_are_rejected(model_type: str) -> None:
    check_direction(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", types_with_two_directions())
def test_encoders_of_every_type_are_rejected(model_type: str) -> None:
    try:
        check_direction(model_type)
    except CannotBuildError as error:
        pytest.skip(str(error))
