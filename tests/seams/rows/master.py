"""The low halves of weights in precision fp32_master."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import horizon_lm
from tests.seams.seam import Case, row
from tests.seams.use import adamw, copied_weights, evaluated, is_streamed, train
from tests.support import tiny_models

SECTION = "Precision fp32_master"
_MASTER = {"precision": "fp32_master"}


def _with_no_grad(write: Callable[[Any], None]) -> Callable[[Any], None]:
    def inside(model: Any) -> None:
        with torch.no_grad():
            write(model)

    return inside


WRITES: dict[str, Callable[[Any], None]] = {
    "fill": _with_no_grad(lambda model: [p.fill_(0.5) for p in model.parameters()]),
    "copy": _with_no_grad(lambda model: [p.copy_(torch.full_like(p, 0.5)) for p in model.parameters()]),
    "data": lambda model: [p.data.fill_(0.5) for p in model.parameters()],
    "foreach": _with_no_grad(
        lambda model: torch._foreach_copy_(ps := list(model.parameters()), [torch.full_like(p, 0.5) for p in ps])
    ),
    "init": lambda model: [nn.init.constant_(p, 0.5) for p in model.parameters()],
    "load_state_dict": lambda model: _load(model),
}


def _load(model: Any) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that the low halves are reset, which another row tests
        model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()})


def _exported(model: Any) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


@row(
    "W13.write",
    SECTION,
    "Write weights in precision `fp32_master`: the low halves of the written weights become zero",
    cases={how: Case(options=_MASTER, arguments={"how": how}) for how in WRITES},
)
def write(model: Any, how: str) -> Any:
    train(model, adamw(model))
    WRITES[how](model)
    return {name: value.float() for name, value in _exported(model).items()}


@row(
    "W13.write-one",
    SECTION,
    "Write one weight in precision `fp32_master`: all others keep their low halves",
    cases={"": Case(options=_MASTER)},
)
def write_one(model: Any) -> Any:
    """Return the names of the changed weights."""
    train(model, adamw(model))
    before = _exported(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(0.5)
    after = _exported(model)
    return sorted(name for name in before if not torch.equal(before[name], after[name]))


@row(
    "W13.edit-then-train",
    SECTION,
    "Edit a weight in precision `fp32_master` right after a step, and continue: `p.mul_(1)` loses no more than the low half",
    cases={"": Case(options=_MASTER)},
    tolerance=0.01,
)
def edit_then_train(model: Any) -> Any:
    optimizer = adamw(model)
    losses = train(model, optimizer)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)
    return losses + train(model, optimizer)


@row("W13.keys", SECTION, "`model.state_dict()` has the keys and shapes of a plain model in every precision",
     cases={p: Case(options={"precision": p}) for p in ("float32", "bf16", "fp32_master")})  # fmt: skip
def keys(model: Any) -> Any:
    return {name: list(value.shape) for name, value in model.state_dict().items()}


def _another(model: Any, precision: str) -> Any:
    """Return a model of the same kind with other weights."""
    other = tiny_models.build("llama", seed=7)
    return horizon_lm.stream(other, precision=precision) if is_streamed(model) else other


_RESUMED = {p: Case(options={"precision": p}, arguments={"precision": p}) for p in ("float32", "bf16", "fp32_master")}


@row(
    "W13.resume",
    SECTION,
    "Resume from `torch.save` of `model.state_dict()` and then of `optimizer.state_dict()`: the run continues as if it had not stopped",
    cases=_RESUMED,
)  # fmt: skip
def resume(model: Any, precision: str) -> Any:
    import warnings

    optimizer = adamw(model)
    train(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        saved = torch.load(path)
    other = _another(model, precision)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that the low halves are reset until the optimizer's state is loaded
        other.load_state_dict(saved["model"])
    its_optimizer = adamw(other)
    its_optimizer.load_state_dict(saved["optimizer"])
    expected, got = train(model, optimizer), train(other, its_optimizer)
    weights, its_weights = copied_weights(model), copied_weights(other)
    return {"losses": expected == got, "weights": [n for n in weights if not torch.equal(weights[n], its_weights[n])]}


@row(
    "W13.resume-without",
    SECTION,
    "Load a model's state in precision `fp32_master` without the optimizer's, which contains the low halves",
    cases={"": Case(options=_MASTER)},
    warns=True,
)
def resume_without(model: Any) -> Any:
    train(model, adamw(model))
    other = _another(model, "fp32_master")
    train(other, adamw(other))
    state = copied_weights(model)
    other.load_state_dict(state)
    return {"loss": evaluated(model) == evaluated(other), "weights": all(
        torch.equal(value.float(), state[name].float()) for name, value in _exported(other).items()
    )}  # fmt: skip
