"""Evaluation between steps."""

from collections.abc import Callable
from typing import Any

import torch

import horizon_lm
from tests.seams.seam import Case, row
from tests.seams.use import adamw, copied_weights, evaluated, is_streamed
from tests.support import tiny_models

SECTION = "Evaluation"


def _dropout(family: str = "llama") -> Any:
    rates = {"llama": {"attention_dropout": 0.3}, "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}}
    return tiny_models.build(family, **rates[family])


def _logprobs(model: Any) -> None:
    if is_streamed(model):
        model.eval()
        with torch.no_grad():
            horizon_lm.token_logprobs(model, **tiny_models.batch())
        model.train()


def _generate(model: Any) -> None:
    model.eval()
    model.generate(tiny_models.batch()["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0)
    model.train()


def _inference_mode(model: Any) -> None:
    model.eval()
    with torch.inference_mode():
        model(**tiny_models.batch())
    model.train()


INTERLUDES: dict[str, Callable[[Any], Any]] = {
    "evaluate": evaluated, "token_logprobs": _logprobs, "generate": _generate, "inference_mode": _inference_mode,
    "save": lambda model: model.state_dict(),
}  # fmt: skip
_SIZES = {"one-micro-batch": None, "micro-batches": 1}


def _run(model: Any, interlude: Callable[[Any], Any]) -> dict[str, Any]:
    """Train three steps with an interlude, starting each time from the same weights and random state."""
    torch.manual_seed(3)
    optimizer, losses = adamw(model), []
    for step in range(3):
        value = model(**tiny_models.batch(seed=step)).loss
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(value))
        interlude(model)
    return {"losses": losses, "weights": copied_weights(model)}


@row(
    "W16.interlude",
    SECTION,
    "Evaluate, generate or save between steps of a model with dropout: training continues as without it",
    cases={
        f"{name}-{size}": Case(_dropout, {"device_micro_batch_size": rows}, {"name": name})
        for name in INTERLUDES
        for size, rows in _SIZES.items()
    },
)
def interlude(model: Any, name: str) -> Any:
    """Return whether a run without the interlude is the same, bit for bit."""
    before = copied_weights(model)
    expected = _run(model, lambda model: None)
    model.load_state_dict(before)
    got = _run(model, INTERLUDES[name])
    same = [torch.equal(expected["weights"][n], got["weights"][n]) for n in before]
    return {"losses": expected["losses"] == got["losses"], "weights": all(same)}


@row(
    "W16.generator",
    SECTION,
    "Evaluate or generate greedily: torch's random state stays as it is",
    cases={f"{n}-{s}": Case(_dropout, {"device_micro_batch_size": r}, {"name": n}) for n in INTERLUDES for s, r in _SIZES.items()},
)  # fmt: skip
def generator(model: Any, name: str) -> Any:
    before = torch.get_rng_state()
    INTERLUDES[name](model)
    return torch.equal(torch.get_rng_state(), before)


@row(
    "W16.dropout",
    SECTION,
    "Train with dropout and one micro-batch: the same draws as a plain model's",
    cases={family: Case(lambda family=family: _dropout(family), {"head": "whole"}) for family in ("llama", "gpt2")},
)
def dropout(model: Any) -> Any:
    return _run(model, evaluated)["losses"]


@row("inference-mode", SECTION, "Evaluate under `torch.inference_mode()` and train afterwards",
     cases={"before": Case(arguments={"first": True}), "between": Case(arguments={"first": False}),
            "resident": Case(options={"resident_blocks": 3, "activation_checkpoints": "device"}, arguments={"first": True}),
            "bf16": Case(options={"precision": "bf16"}, arguments={"first": True})},
     tolerance=2e-2)  # fmt: skip
def inference_mode(model: Any, first: bool) -> Any:
    optimizer, losses = adamw(model, lr=1e-3), []
    for step in range(2):
        if first or step:
            with torch.inference_mode():
                losses.append(float(model(**tiny_models.batch()).loss))
        value = model(**tiny_models.batch(seed=step)).loss
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(value))
    return losses
