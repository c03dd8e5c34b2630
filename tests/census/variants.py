"""Cases on variants of a config."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from tests.census.comparison import Outcome, worst
from tests.census.overrides import SHARED_STATE
from tests.census.subject import NoSuchCaseError, Subject, attempt, first_sentence
from tests.census.text_cases import default, whole
from tests.census.tiny_models import describe_model


def other_tie(subject: Subject) -> Outcome:
    """Compare a step with the head tied to the embedding if it is untied by default, and vice versa."""
    tied = describe_model(subject.model)["tied"]
    return _variant(subject, {"tie_word_embeddings": not tied}, lambda model: describe_model(model)["tied"] != tied)


def auxiliary_loss(subject: Subject) -> Outcome:
    """Compare a step of a mixture of experts with the loss of its router."""
    known = "output_router_logits" in type(subject.model.config.get_text_config()).__dataclass_fields__
    return _variant(subject, {"output_router_logits": True} if known else None, lambda model: True)


def shared_state(subject: Subject) -> Outcome:
    """Compare a step of blocks that use results of earlier blocks."""
    return _variant(subject, SHARED_STATE.get(subject.model_type), lambda model: True)


def _variant(subject: Subject, overrides: dict[str, Any] | None, is_one: Callable[[Any], bool]) -> Outcome:
    """Run the cases `whole` and `default` on a variant of the config. Return the worse outcome."""
    if overrides is None:
        raise NoSuchCaseError("its config has no such field")
    try:
        inner = isinstance(getattr(subject.model.config, "text_config", None), PreTrainedConfig)
        variant = Subject(
            subject.mapping, subject.model_type, overrides | ({"text_config": overrides} if inner else {})
        )
        variant.model  # noqa: B018
    except Exception as error:
        raise NoSuchCaseError(first_sentence(error)) from error
    if not is_one(variant.model):
        raise NoSuchCaseError("the model is the same whatever its config says")
    return worst([attempt(case, variant) for case in (whole, default)])
