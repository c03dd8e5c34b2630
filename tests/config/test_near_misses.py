"""Suggestions for mistyped names: of the same meaning, family and size, or none."""

from pathlib import Path

import pytest

from horizon_lm.common.near_misses import closest_machines, closest_model, closest_path, closest_setting
from horizon_lm.errors import ConfigError
from horizon_lm.model.known_models import known_models
from horizon_lm.planning.arithmetic.catalog import find_profile, published

SETTINGS = (
    "max_steps", "max_length", "learning_rate", "precision", "eval_strategy", "save_strategy", "per_device_train_batch_size",
    "num_train_epochs", "save_total_limit",
)  # fmt: skip
MODELS = (
    "Qwen/Qwen2.5-14B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-4B-Instruct-2507", "google/gemma-2-27b-it", "google/gemma-3-27b-it",
    "mistralai/Mixtral-8x7B-v0.1", "mistralai/Mistral-7B-v0.3", "zai-org/GLM-4.5-Air", "Qwen/Qwen3-30B-A3B",
)  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("max_samples", None), ("max_step", "max_steps"), ("lerning_rate", "learning_rate"), ("precison", "precision"),
        ("max_seq_length", "max_length"), ("per_device_batch_size", "per_device_train_batch_size"), ("num_epochs", "num_train_epochs"),
        ("save_total_limits", "save_total_limit"), ("log_strategy", None), ("zzz", None),
    ],
)  # fmt: skip
def test_settings(typed: str, meant: str | None) -> None:
    assert closest_setting(typed, SETTINGS) == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("Qwen/Qwen2.5-7B-Instrut", "Qwen/Qwen2.5-7B-Instruct"), ("Qwen9-4B-Instruct-2507", None), ("gemma-3-27b-itt", "google/gemma-3-27b-it"),
        ("gemma-3-12b-it", None), ("Qwen3-4B-Instrct-2507", "Qwen/Qwen3-4B-Instruct-2507"), ("GLM-4.5-Airr", "zai-org/GLM-4.5-Air"),
        ("GLM-4.6-Air", None), ("Mixtrl-8x7B-v0.1", "mistralai/Mixtral-8x7B-v0.1"), ("qwen3-30b", "Qwen/Qwen3-30B-A3B"),
        ("google/gemma-3-27b", "google/gemma-3-27b-it"), ("", None), ("qwen-7b", "Qwen/Qwen2.5-7B-Instruct"), ("qwen2-7b", None),
        ("qwen3-7b", None), ("mistral-7b", "mistralai/Mistral-7B-v0.3"), ("other/Qwen2-7B", None), ("qwen2.5:14b", "Qwen/Qwen2.5-14B-Instruct"),
    ],
)  # fmt: skip
def test_models(typed: str, meant: str | None) -> None:
    assert closest_model(typed, MODELS) == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("llama-3.1:8b", "meta-llama/Llama-3.1-8B"), ("Lama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("meta-llama/Metta-Llama-3.1-8B", None), ("meta-lama/Meta-Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B"),
        ("llama-2-7b", None), ("llama-70b", None), ("olmo-2-7b", "allenai/OLMo-2-1124-7B"), ("smollm-135m", "HuggingFaceTB/SmolLM2-135M"),
        ("qwen-32b", None), ("qwen3", None), ("smollm2", None), ("codellama-8b", None), ("deepseek-r1-distill-llama-8b", None), ("gemma-2-2b-itt", "google/gemma-2-2b-it"),
    ],
)  # fmt: skip
def test_published_models(typed: str, meant: str | None) -> None:
    """Short names are answered with the published one of the same family, version and size."""
    assert closest_model(typed, [name for each in known_models() for name in (each.name, *each.aliases)]) == meant


@pytest.mark.parametrize(
    "typed",
    [
        "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL-7B", "Qwen/Qwen2.5-Omni-7B", "Qwen/Qwen2.5-Coder-7B-Instruct", "Qwen/Qwen2.5-Math-7B",
        "Qwen/Qwen2.5-7B-Instruct-1M", "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-4B-Instruct-2508", "mistralai/Mistral-7B-v0.2", "qwen3-30b-a4b",
        "mistralai/Mixtral-8x7B-v0.2", "meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-3-70b", "llama3:8b", "meta-llama/Llama-3.2-11B-Vision",
        "microsoft/Phi-4-multimodal-instruct", "microsoft/Phi-4-omni-instruct", "google/gemma-3n-E4B-it", "deepseek-ai/DeepSeek-VL2",
        "moonshotai/Kimi-K2.5", "moonshotai/Kimi-VL-A3B", "zai-org/GLM-4.5V", "Qwen/Qwen2.5-7B-Instruct-GGUF",
    ],
)  # fmt: skip
def test_other_models_are_no_spellings_of_published_ones(typed: str) -> None:
    assert closest_model(typed, [name for each in known_models() for name in (each.name, *each.aliases)]) is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("rtx490", ["rtx-4090"]), ("RTX 4090", ["rtx-4090"]), ("rtx-4090-sever", ["rtx-4090-server"]), ("rtx-4050", []), ("h2000", ["h200"]),
        ("mi300", ["mi300x"]), ("a100", ["a100-pcie-80gb"]), ("b300", []), ("tpu", []), ("", []),
        ("4090", ["rtx-4090"]), ("my 4090", ["rtx-4090"]), ("2x 5090", ["rtx-5090"]), ("4090 laptop chip", ["rtx-4090-laptop"]), ("my 3080", []),
        ("6000", ["rtx-a6000", "rtx-pro-6000"]), ("my 6000 pro", ["rtx-pro-6000"]), ("100", ["h100"]), ("4", []),
    ],
)  # fmt: skip
def test_machines(typed: str, meant: list[str]) -> None:
    assert closest_machines(typed, published()) == meant


def test_two_machines_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"device '6000' is not known \(did you mean rtx-a6000 or rtx-pro-6000\?\); choose"
    ):
        find_profile("6000")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("out/checkpoint-11", "out/checkpoint-10"), ("outt/checkpoint-10", "out/checkpoint-10"), ("./out/modle", "out/model"),
        ("trian.jsonl", "train.jsonl"), ("train.json", "train.jsonl"), ("run.yml", "run.yaml"), ("eval.jsonl", None),
        ("out/model", "out/model"), ("other/checkpoint-10", None), ("train.jsonl/rows", None), ("a\0b", None),
        ("Llama-3.1-8B", "Llama-3.1-70B"),
    ],
)  # fmt: skip
def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, meant: str | None) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("out/checkpoint-10", "out/model", "Llama-3.1-70B"):
        Path(folder).mkdir(parents=True)
    for file in ("train.jsonl", "train.txt", "run.yaml"):
        Path(file).touch()
    assert closest_path(typed) == (None if meant is None else Path(meant))
