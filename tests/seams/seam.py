"""The table of rows, and the function that runs a row."""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

import horizon_lm
from horizon_lm.errors import HorizonError, SlowProductsWarning
from tests.seams.compare import difference
from tests.seams.use import copied_weights, evaluated, gradients
from tests.support import tiny_models

WORKS, REJECTED, EITHER = "works", "is rejected", "works or is rejected"
WRONG = "is wrong"

Body = Callable[..., Any]


def llama() -> Any:
    """Build the default model, for rows that do not depend on the kind of model."""
    return tiny_models.build("llama")


@dataclass(frozen=True)
class Case:
    """A model on which a row is tried.

    Attributes:
        build: function that builds the plain model; returns the same result each time.
        options: arguments of `horizon_lm.stream` in addition to ``precision="float32"``.
        arguments: further arguments of the row's body.
        stream: function that streams a plain model; None for `horizon_lm.stream` with the options.
    """

    build: Callable[[], Any] = llama
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    stream: Callable[[Any], Any] | None = None

    def plain(self) -> Any:
        """Build the plain model."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.build()

    def streamed(self) -> Any:
        """Build the model and stream it."""
        model = self.plain()
        return (
            self.stream(model) if self.stream else horizon_lm.stream(model, **({"precision": "float32"} | self.options))
        )


@dataclass(frozen=True)
class Row:
    """A use of a model by other code.

    Attributes:
        key: the name of the test.
        section: the section of the page.
        text: a description of the use, for the page.
        expected: `WORKS`, `REJECTED` or `EITHER`.
        body: function that uses a model, and returns values that must be equal on a plain and on a streamed model.
        cases: the models on which the row is tried, by name.
        tolerance: the maximum relative difference of a tensor.
        edits: the body may have changed weights before it was rejected.
        says: a pattern that the message of a rejection must match.
        warns: a warning is required; the page mentions all warnings.
        survives: the model can be used after a rejection, because the body has undone its changes.
        keeps_gradients: gradients can be computed after a rejection.
    """

    key: str
    section: str
    text: str
    expected: str
    body: Body = field(repr=False)
    cases: Mapping[str, Case] = field(repr=False)
    tolerance: float = 1e-5
    edits: bool = False
    warns: bool = False
    survives: bool = True
    keeps_gradients: bool = True
    says: str = ""

    def allows(self, outcome: "Outcome") -> bool:
        """Return whether an outcome is expected."""
        return outcome.kind in ((WORKS, REJECTED) if self.expected == EITHER else (self.expected,))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a row. ``kind`` is `WORKS`, `REJECTED` or `WRONG`; ``message`` is the error, the warning or the
    reason.
    """

    kind: str
    message: str = ""


ROWS: dict[str, Row] = {}


def row(
    key: str, section: str, text: str, expected: str = WORKS, cases: Mapping[str, Case] | None = None, **settings: Any
) -> Callable[[Body], Body]:
    """Add the decorated body to the table."""

    def add(body: Body) -> Body:
        assert key not in ROWS, key
        ROWS[key] = Row(key, section, text, expected, body, cases or {"": Case()}, **settings)
        return body

    return add


def all_cases() -> list[tuple[str, str]]:
    """Return all pairs of a row's key and the name of one of its cases."""
    return [(key, name) for key, each in ROWS.items() for name in each.cases]


@cache
def run(key: str, name: str) -> Outcome:
    """Try a row on one of its cases."""
    each = ROWS[key]
    case = each.cases[name]
    expected, plain_warnings = _plain_values(key, name)
    model, warned_first = _call(lambda case: case.streamed(), case, {})
    if isinstance(model, HorizonError):
        return _rejection(model, each.says)
    if isinstance(model, Exception):
        return Outcome(WRONG, f"{type(model).__name__}: {model}")
    before = copied_weights(model)
    value, warned = _call(each.body, model, case.arguments)
    if isinstance(value, HorizonError):
        outcome = _rejection(value, each.says)
        left = _half_done(each, case, model, before) if each.survives else None
        return Outcome(WRONG, f"{outcome.message}\nafterwards {left}") if left else outcome
    if isinstance(value, Exception):
        return Outcome(WRONG, f"{type(value).__name__}: {value}")
    if isinstance(expected, Exception):
        return Outcome(WRONG, f"nothing is raised, where a plain model raises {type(expected).__name__}: {expected}")
    found = difference(expected, value, each.tolerance)
    warned = [text for text in warned_first + warned if text not in plain_warnings]
    if each.warns and not warned:
        found = found or "there is no warning"
    if found:
        return Outcome(WRONG, found)
    return Outcome(WORKS, _without_places(warned[0]) if warned else "")


_KNOWN: dict[Any, tuple[Any, list[str]]] = {}


def _plain_values(key: str, name: str) -> tuple[Any, list[str]]:
    """Return the values of the body on the plain model, and its warnings; run once for cases that differ only in
    options.
    """
    each = ROWS[key]
    case = each.cases[name]
    known = (key, case.build, str(sorted(case.arguments.items(), key=str)))
    if known not in _KNOWN:
        _KNOWN[known] = _call(each.body, case.plain(), case.arguments)
    value = _KNOWN[known][0]
    if isinstance(value, Exception) and each.expected != REJECTED:
        raise value
    return _KNOWN[known]


def _rejection(error: HorizonError, says: str) -> Outcome:
    message = f"{type(error).__name__}: {_without_places(str(error))}"
    if "the schedule expects" in message:
        return Outcome(WRONG, f"{message}: this has no remedy, and nobody outside knows the schedule")
    if not re.search(says, message):
        return Outcome(WRONG, f"{message}: this does not say {says!r}")
    return Outcome(REJECTED, message)


def _call(body: Body, subject: Any, arguments: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return the value or the error of the body, and its warnings."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", SlowProductsWarning)  # which depends on the machine
        try:
            value = body(subject, **arguments)
        except Exception as error:
            value = error.with_traceback(None) if isinstance(error, HorizonError) else error
    return value, [str(each.message) for each in caught]


def _half_done(each: Row, case: Case, model: Any, before: Mapping[str, torch.Tensor]) -> str | None:
    """Describe the damage done by a rejection; None if the model computes as before, with the same weights."""
    plain = case.plain()
    try:
        after = copied_weights(model)
        if not each.edits and (changed := difference(before, after, 0.0)):
            return f"the weights have changed: {changed}"
        for name, param in plain.named_parameters():
            param.requires_grad_(model.get_parameter(name).requires_grad)
        plain.load_state_dict({name: value.clone() for name, value in after.items()})
        look = gradients if each.keeps_gradients else evaluated
        exact = case.options.get("precision", "float32") == "float32"
        left = difference(look(plain.eval()), look(model.eval()), 1e-4 if exact else 1e-2)
    except Exception as error:
        return f"the model cannot be used: {type(error).__name__}: {error}"
    return f"the model computes something else: {left}" if left else None


def _without_places(message: str) -> str:
    """Return a message without the parts that differ between runs: temporary folders and addresses."""
    return re.sub(r"0x[0-9a-f]+", "0x...", re.sub(r"/tmp/[^\s'\",;)]+", "FOLDER", message))
