"""A warning names the line of a user's program that has led to it."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.device import slow_products
from horizon_lm.errors import ForeignWriteWarning, HeadWarning, SlowProductsWarning
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
    ],
)
def test_the_line_that_a_warning_names(category: type[Warning], act: Callable[[Any], Any]) -> None:
    model = horizon_lm.stream(build("llama"), precision="fp32_master")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act(model)
    assert [each.filename for each in caught if each.category is category] == [__file__]


def _forward(model: Any, autocast: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(**batch())


@pytest.mark.parametrize(
    ("has_instructions", "autocast", "compute_dtype", "expected"),
    [(False, True, None, 1), (False, False, torch.bfloat16, 1), (False, False, None, 0), (True, True, None, 0)],
)
def test_slow_products_are_named_once(
    monkeypatch: pytest.MonkeyPatch,
    has_instructions: bool,
    autocast: bool,
    compute_dtype: torch.dtype | None,
    expected: int,
) -> None:
    slow_products.warn_of_slow_products.cache_clear()
    monkeypatch.setattr(slow_products, "has_instructions", lambda dtype: has_instructions)
    model = horizon_lm.stream(build("llama"), precision="float32", compute_dtype=compute_dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            _forward(model, autocast)
    found = [str(each.message) for each in caught if each.category is SlowProductsWarning]
    assert len(found) == expected
    assert all("bfloat16" in each and "bf16=False" in each for each in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_instructions_of_this_cpu_are_known(dtype: torch.dtype) -> None:
    assert slow_products.has_instructions(dtype) in (True, False)
