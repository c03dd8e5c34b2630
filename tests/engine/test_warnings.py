"""A warning names the line of a user's program that has led to it."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.errors import ForeignWriteWarning, HeadWarning
from tests.support.tiny_models import batch, build


def _without_chunks() -> Any:
    model = build("llama")
    model.loss_function = lambda *args, **kwargs: torch.zeros(())  # a loss of its own cannot be cut into chunks
    return model


def _write(model: Any) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(2)


@pytest.mark.parametrize(
    ("category", "act"),
    [
        (HeadWarning, lambda model: horizon_lm.stream(_without_chunks())),
        (ForeignWriteWarning, lambda model: (_write(model), model(**batch()))),
        (UserWarning, lambda model: model.gradient_checkpointing_enable()),
    ],
)
def test_the_line_that_a_warning_names(category: type[Warning], act: Callable[[Any], Any]) -> None:
    model = horizon_lm.stream(build("llama"), precision="fp32_master")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act(model)
    assert [each.filename for each in caught if each.category is category] == [__file__]
