"""The class that a folder is opened as: what its config was saved with, if transformers has a type with and without a tower."""

from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    Gemma3Config,
    Llama4Config,
    LlamaConfig,
    LlavaConfig,
    Qwen3_5Config,
)

from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model.hf_config import auto_class, auto_classes, require_model, saved_class


@pytest.mark.parametrize(
    ("config", "architectures", "expected"),
    [
        (Qwen3_5Config(), ["Qwen3_5ForConditionalGeneration"], AutoModelForImageTextToText),
        (Qwen3_5Config(), ["Qwen3_5ForCausalLM"], AutoModelForCausalLM),
        (Qwen3_5Config(), None, AutoModelForCausalLM),
        (Llama4Config(), ["Llama4ForConditionalGeneration"], AutoModelForCausalLM),  # the other one is not proven
        (LlavaConfig(), None, AutoModelForImageTextToText),
        (LlamaConfig(), ["LlamaForCausalLM"], AutoModelForCausalLM),
    ],
)
def test_a_model_is_opened_as_it_was_saved(config: Any, architectures: Any, expected: Any) -> None:
    config.architectures = architectures
    assert auto_class(None, config) is expected
    is_llama4 = isinstance(config, Llama4Config)  # once it is trained, whether it is proven does not matter
    assert saved_class(config) is (AutoModelForImageTextToText if is_llama4 else expected)


def test_a_class_that_is_named_is_used() -> None:
    config = Qwen3_5Config(architectures=["Qwen3_5ForConditionalGeneration"])
    assert auto_class(AutoModelForCausalLM, config) is AutoModelForCausalLM
    assert auto_class(AutoModelForImageTextToText, LlamaConfig()) is AutoModelForImageTextToText
    config.architectures = ["Qwen3_5ForSequenceClassification"]
    assert saved_class(config) is AutoModelForSequenceClassification


@pytest.mark.parametrize(
    ("config", "others"),
    [
        (Qwen3_5Config(architectures=["Qwen3_5ForConditionalGeneration"]), [AutoModelForCausalLM]),
        (Qwen3_5Config(), [AutoModelForImageTextToText]),
        (Gemma3Config(), []),  # one model under both classes
        (LlavaConfig(), []),
        (LlamaConfig(), []),
    ],
)
def test_all_classes_of_a_type(config: Any, others: list[Any]) -> None:
    assert auto_classes(config) == [auto_class(None, config), *others]


def test_a_type_without_a_tower_is_named() -> None:
    with pytest.raises(ModelNotSupportedError, match="'llama' has no model of images and text in transformers"):
        require_model(LlamaConfig(), "here", AutoModelForImageTextToText)
