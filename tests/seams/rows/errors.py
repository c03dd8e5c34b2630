"""Errors of other code between calls."""

from collections.abc import Callable
from typing import Any

import torch

import horizon_lm
from horizon_lm.device.simulated import SimulatedDevice
from tests.seams.seam import EITHER, Case, row
from tests.seams.use import adamw, copied_weights, evaluated, gradients, loss
from tests.support import tiny_models

SECTION = "Errors of other code"


class _OfOthersError(Exception):
    pass


def _late(model: Any) -> Any:
    """Stream onto a simulated device that runs every operation as late as possible."""
    return horizon_lm.stream(model, device=SimulatedDevice(eagerness=0.0), precision="float32")


def _raises(model: Any, kind: type[Exception], **arguments: Any) -> str:
    """Return the name of the error that a forward or backward pass raises, and drop the step."""
    try:
        loss(model, **arguments).backward()
        return "nothing"
    except kind:
        return kind.__name__
    finally:
        model.zero_grad()


_WHEN = {
    f"{when}-{name}": Case(stream=stream, arguments={"pending": when == "after-a-step", "training": training})
    for when in ("at-first", "after-a-step")
    for name, stream, training in (
        ("training", None, True),
        ("evaluation", None, False),
        ("late-training", _late, True),
        ("late-evaluation", _late, False),
    )
}


@row(
    "errors.tokens",
    SECTION,
    "A batch with a token outside the vocabulary, also while updates are running: raises `IndexError`, and training can continue",
    cases=_WHEN,
)
def unknown_tokens(model: Any, pending: bool, training: bool) -> Any:
    optimizer = adamw(model)
    if pending:
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    ids = tiny_models.batch()["input_ids"]
    ids[0, 0] = 10**6
    with torch.set_grad_enabled(training):
        raised = _raises(model, IndexError, input_ids=ids)
    return [raised, copied_weights(model), gradients(model)]


def _fail(*args: Any) -> None:
    raise _OfOthersError("an error of somebody else")


@row(
    "errors.hook",
    SECTION,
    "An error in a hook of a module inside a block, in the forward or backward pass: it is raised, and training can continue",
    cases={
        f"{how}-{name}": Case(options=options, arguments={"how": how})
        for how in ("forward", "backward")
        for name, options in (("plain", {}), ("resident", {"resident_blocks": 3, "resident_graphs": 3}))
    },
)
def error_in_a_hook(model: Any, how: str) -> Any:
    optimizer = adamw(model)
    mlp = model.model.layers[1].mlp
    handle = mlp.register_forward_hook(_fail) if how == "forward" else mlp.register_full_backward_hook(_fail)
    raised = _raises(model, _OfOthersError)
    handle.remove()
    loss(model).backward()
    optimizer.step()
    return [raised, evaluated(model), gradients(model)]


def _with(name: str, value: Any) -> dict[str, Any]:
    return tiny_models.batch(padding="none") | {name: value}


def _labels(value: int) -> torch.Tensor:
    labels = tiny_models.batch(padding="none")["labels"].clone()
    labels[1, 3] = value
    return labels


BAD: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "both": lambda: _with("inputs_embeds", torch.zeros(3, 11, 32)),
    "short-labels": lambda: _with("labels", torch.ones(3, 5, dtype=torch.long)),
    "long-labels": lambda: _with("labels", torch.ones(3, 12, dtype=torch.long)),
    "labels-of-fewer-rows": lambda: _with("labels", torch.ones(2, 11, dtype=torch.long)),
    "unknown-label": lambda: _with("labels", _labels(tiny_models.VOCABULARY)),
    "negative-label": lambda: _with("labels", _labels(-5)),
    "float-labels": lambda: _with("labels", torch.ones(3, 11)),
    "int32-labels": lambda: _with("labels", _labels(3).int()),
    "bool-mask": lambda: _with("attention_mask", torch.ones(3, 11, dtype=torch.bool)),
    "float-mask": lambda: _with("attention_mask", torch.ones(3, 11)),
    "int32-tokens": lambda: _with("input_ids", tiny_models.batch(padding="none")["input_ids"].int()),
    "float-tokens": lambda: _with("input_ids", torch.ones(3, 11)),
    "flat-tokens": lambda: _with("input_ids", torch.ones(11, dtype=torch.long)),
    "no-rows": lambda: {name: value[:0] for name, value in tiny_models.batch(padding="none").items()},
    "one-token": lambda: {name: value[:, :1] for name, value in tiny_models.batch(padding="none").items()},
    "shifted-labels": lambda: _with("shift_labels", tiny_models.batch(padding="none")["labels"]),
    "only-shifted-labels": lambda: _with("shift_labels", _labels(3)) | {"labels": None},
    "ignored-index": lambda: _with("labels", _labels(7)) | {"ignore_index": 7},
    "positions": lambda: _with("position_ids", torch.arange(11).flip(0)[None]),
}


@row(
    "errors.arguments",
    SECTION,
    "A call with unusual or invalid arguments: works if and only if a plain model accepts them",
    cases={
        f"{what}-{head}": Case(options={"head": head}, arguments={"what": what})
        for what in BAD
        for head in ("whole", "chunked")
    },
)
def bad_arguments(model: Any, what: str) -> Any:
    try:
        value = float(model(**BAD[what]()).loss.detach())
    except Exception as error:
        if isinstance(error, AssertionError):
            raise
        value = "an error"  # the type of error depends on the model
    model.zero_grad()
    return [value, gradients(model)]


@row(
    "errors.flat-labels",
    SECTION,
    "A call with labels in another shape than `input_ids`, but as many as tokens",
    EITHER,
    cases={head: Case(options={"head": head}) for head in ("whole", "chunked")},
)
def flat_labels(model: Any) -> Any:
    return gradients(model, **_with("labels", torch.ones(33, dtype=torch.long)))
