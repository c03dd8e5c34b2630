"""Known models have the published number of parameters when transformers builds them."""

import json
import re
from collections import Counter
from importlib import resources
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_lm.model.known_models import KnownModel, find_known, full_name, known_config, known_models
from horizon_lm.model.laid_out import model_layout
from horizon_lm.model.skeletons import build_skeleton
from horizon_lm.model.units import find_parts

FILES = sorted((resources.files("horizon_lm.model") / "published").iterdir(), key=lambda file: file.name)


def build(config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def num_parameters(config: dict[str, Any]) -> int:
    return sum(parameter.numel() for parameter in build(config).parameters())  # a tied parameter counts once


def unit_sizes(model: Any) -> dict[str, int]:
    """Return the number of elements of each unit, found only by names."""
    sizes: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        found = re.search(r"(?:layers|h)\.(\d+)\.", name)
        other = "embed" if "embed_tokens" in name else "head" if "lm_head" in name else "outer"
        sizes[f"block{found[1]}" if found else other] += parameter.numel()
    return dict(sizes)


@pytest.mark.parametrize("model", known_models(), ids=lambda model: model.name)
def test_published_parameters_and_units_match_transformers(model: KnownModel) -> None:
    expected = unit_sizes(build(dict(model.config)))
    assert sum(expected.values()) == model.parameters
    layout = model_layout(find_parts(build_skeleton(known_config(model))))
    found = Counter({str(unit): slabs.layout.num_params for unit, slabs in layout.units.items()})
    assert +found == expected
    assert layout.num_parameters == model.parameters
    assert (layout.vocabulary, layout.tied) == (model.config["vocab_size"], "head" not in expected)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("Qwen/Qwen2.5-0.5B", {"tie_word_embeddings": False}),
        ("Qwen/Qwen3-0.6B", {"head_dim": 64}),
        ("zai-org/GLM-4.5", {"use_qk_norm": False}),
        ("openai/gpt-oss-20b", {"attention_bias": False}),
        ("google/gemma-3-4b-pt (text)", {"vocab_size": 262144}),
        ("deepseek-ai/DeepSeek-V3", {"n_shared_experts": 2}),
    ],
)
def test_wrong_shape_changes_parameter_count(name: str, wrong: dict[str, Any]) -> None:
    model = find_known(name)
    assert model is not None
    assert num_parameters({**model.config, **wrong}) != model.parameters


def test_models_are_sorted_by_size() -> None:
    sizes = [model.parameters for model in known_models()]
    assert len(sizes) == len(FILES) >= 40
    assert sizes == sorted(sizes)
    assert sizes[0] < 2e8
    assert sizes[-1] > 6e11


def test_names_and_aliases_are_unique() -> None:
    names = Counter(name.casefold() for model in known_models() for name in (model.name, *model.aliases))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_file_name_and_source(file: Any) -> None:
    entry = json.loads(file.read_text(encoding="utf-8"))
    assert file.name == entry["name"].replace("/", "--").replace(" (text)", "-text") + ".json"
    assert entry["parameters_source"]


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-7B",
        "qwen/qwen2.5-7b",
        "Qwen/Qwen2.5-7B-Instruct",
        "QWEN2.5-7B",
        "Qwen2.5-7B-Instruct",
    ],
)
def test_find_by_name_alias_or_without_organization(name: str) -> None:
    model = find_known(name)
    assert model is not None
    assert model.name == "Qwen/Qwen2.5-7B"
    assert model.parameters == 7_615_616_512


@pytest.mark.parametrize(
    ("typed", "name", "hub_id"),
    [
        ("gemma-3-27b-it", "google/gemma-3-27b-pt (text)", "google/gemma-3-27b-it"),
        ("google/gemma-3-27b-it", "google/gemma-3-27b-pt (text)", "google/gemma-3-27b-it"),
        ("gemma-3-4b-it (text)", "google/gemma-3-4b-pt (text)", "google/gemma-3-4b-it"),
        ("Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Instruct-2507"),
        ("Qwen3-Coder-30B-A3B-Instruct", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
        ("Qwen3-Next-80B-A3B-Thinking", "Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Thinking"),
        ("Mistral-Small-3.2-24B-Instruct-2506", "mistralai/Mistral-Small-3.1-24B-Base-2503 (text)", "mistralai/Mistral-Small-3.2-24B-Instruct-2506"),
        ("glm-4.5-air", "zai-org/GLM-4.5-Air", "zai-org/GLM-4.5-Air"),
    ],
)  # fmt: skip
def test_releases_and_language_models_have_their_own_names(typed: str, name: str, hub_id: str) -> None:
    model = find_known(typed)
    assert model is not None
    assert (model.name, full_name(typed)) == (name, hub_id)


@pytest.mark.parametrize(
    ("name", "positions", "rope_theta"),
    [
        ("Qwen/Qwen2.5-7B", 131_072, 1e6),
        ("Qwen2.5-7B-Instruct", 32_768, 1e6),
        ("Qwen3-4B", 40_960, 1e6),
        ("Qwen3-4B-Base", 32_768, 1e6),
        ("qwen/qwen3-4b-instruct-2507", 262_144, 5e6),
        ("Qwen3-235B-A22B-Thinking-2507", 262_144, 5e6),
        ("Qwen3-30B-A3B-Instruct-2507", 262_144, 1e7),
        ("Qwen3-Coder-30B-A3B-Instruct", 262_144, 1e7),
        ("Llama-3.3-70B-Instruct", 131_072, 5e5),
        ("Mistral-Small-24B-Instruct-2501", 32_768, 1e8),
        ("Mistral-Small-3.2-24B-Instruct-2506", 131_072, 1e9),
    ],
)
def test_releases_have_their_own_positions(name: str, positions: int, rope_theta: float) -> None:
    model = find_known(name)
    assert model is not None
    assert (model.config["max_position_embeddings"], model.config["rope_theta"]) == (positions, rope_theta)
    assert known_config(model).max_position_embeddings == positions


@pytest.mark.parametrize("model", known_models(), ids=lambda model: model.name)
def test_differences_are_of_aliases_and_settings(model: KnownModel) -> None:
    assert model.differences.keys() <= set(model.aliases)
    for changed in model.differences.values():
        assert changed.keys() <= {"max_position_embeddings", "rope_theta"}  # the parameters are those of the model
        assert all(model.config[name] != value for name, value in changed.items())


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-8B", "meta-llama/Qwen2.5-7B", "Qwen", ""])
def test_unknown_model(name: str) -> None:
    assert find_known(name) is None


def test_ambiguous_name_needs_organization(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = tuple(KnownModel(f"{org}/twin", (), 1, {}) for org in ("one", "other"))
    monkeypatch.setattr("horizon_lm.model.known_models._read", lambda: twins)
    assert find_known("twin") is None
    assert find_known("Other/Twin") == twins[1]


def test_callers_get_copies() -> None:
    for read in (lambda: find_known("Llama-3.1-8B"), lambda: known_models()[-1]):
        model = read()
        assert model is not None
        model.config["rope_scaling"]["rope_theta"] = 1.0  # as in transformers
        again = read()
        assert again is not None
        assert "rope_theta" not in again.config["rope_scaling"]
