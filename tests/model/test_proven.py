"""Only models in the table of proven models are streamed, unless the user allows others."""

import copy
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import horizon_lm
from horizon_lm.errors import ModelNotSupportedError, UnprovenModelWarning
from horizon_lm.model import proven
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
