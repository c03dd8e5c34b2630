"""Only models in the table of proven models are streamed, unless the user allows others."""

import copy
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaForCausalLM, T5Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import horizon_lm
from horizon_lm.errors import ModelNotSupportedError, UnprovenModelWarning
from horizon_lm.model import hf_config, proven
from tests.support import tiny_models


class OwnLlama(LlamaForCausalLM):
    """A derived class, whose code is not the code that was compared."""


def table(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Stream with an altered table."""
    changed = copy.deepcopy(proven._table())
    change(changed["types"])
    monkeypatch.setattr(proven, "_table", lambda: changed)


def own() -> Any:
    return OwnLlama(tiny_models.build("llama").config)


def test_a_derived_class_is_rejected_by_name() -> None:
    with pytest.raises(
        ModelNotSupportedError, match=r"OwnLlama changes transformers' LlamaForCausalLM.*allow_unproven_model"
    ):
        horizon_lm.stream(own())


def test_unproven_models_may_be_streamed_with_a_warning() -> None:
    with pytest.warns(UnprovenModelWarning, match="OwnLlama changes"):
        model = horizon_lm.stream(own(), allow_unproven_model=True)
    model(**tiny_models.batch()).loss.backward()


def test_a_type_that_is_not_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table(monkeypatch, lambda types: types.pop("llama"))
    with pytest.raises(ModelNotSupportedError, match=r"LlamaForCausalLM of type 'llama' is not in the table"):
        horizon_lm.stream(tiny_models.build("llama"))


def test_models_of_images_and_text_are_opened_as_such() -> None:
    """The commands open causal language models, and every other type that the table has with images as a model of images and text."""
    types = [kind for kind, entry in proven._table()["types"].items() if proven.IMAGES in entry["features"]]
    configs = {kind: CONFIG_MAPPING[kind] for kind in types if kind in CONFIG_MAPPING}
    others = {kind: cls for kind, cls in configs.items() if cls not in MODEL_FOR_CAUSAL_LM_MAPPING}
    assert {"qwen2_5_vl", "llava", "internvl"} <= others.keys()
    for kind, cls in others.items():
        config = cls()
        model_class = hf_config.auto_class(None, config)
        assert hf_config.require_model(config, "the folder", model_class) is config
        assert model_class._model_mapping[cls].__name__ == proven._table()["types"][kind]["class"], kind
    assert hf_config.auto_class(None, configs["gemma3"]()) is AutoModelForCausalLM
    with pytest.raises(
        ModelNotSupportedError, match="no causal language model in transformers; Horizon-LM trains decoders"
    ):
        hf_config.require_model(T5Config(), "the folder", hf_config.auto_class(None))


@pytest.mark.parametrize(
    ("feature", "options"),
    [("untied", {}), ("micro_batches", {"device_micro_batch_size": 1}), ("varlen", {"attn_implementation": "varlen"})],
)
def test_a_feature_that_is_not_in_the_table(
    monkeypatch: pytest.MonkeyPatch, feature: str, options: dict[str, Any]
) -> None:
    table(monkeypatch, lambda types: types["llama"]["features"].remove(feature))
    with pytest.raises(ModelNotSupportedError, match="LlamaForCausalLM was not proven with"):
        horizon_lm.stream(tiny_models.build("llama"), **options)


def test_another_version_of_transformers_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {**proven._table(), "transformers": "5.1.0"}
    monkeypatch.setattr(proven, "_table", lambda: changed)
    proven.warn_of_other_version.cache_clear()
    with pytest.warns(UserWarning, match=r"with plain autograd in transformers 5\.1\.0, and 5\..* is installed"):
        horizon_lm.stream(tiny_models.build("llama"))
    horizon_lm.stream(tiny_models.build("llama"))  # a second warning would be an error
