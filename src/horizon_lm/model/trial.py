"""Run a model's outer code with functions in place of its units: embedding, blocks, norm and head."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from horizon_lm.common.units import OUTER, Unit
from horizon_lm.model.functional import Place, in_place
from horizon_lm.model.parts import ModelParts, ParamRef

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and named arguments
Answer = Callable[..., Any]
"""Function that takes the arguments of a module's forward method, and returns an output in its place."""


class TrialDoneError(Exception):
    """Raised by an answer to end a trial, once it has seen enough."""


@contextmanager
def answering(answers: Mapping[nn.Module, Answer]) -> Iterator[None]:
    """Context manager: call functions in place of modules, until one of them raises `TrialDoneError`, which ends the context quietly.

    Contexts may be nested: the innermost one answers.
    """
    before = {module: module.__dict__.get("forward") for module in answers}
    for module, answer in answers.items():
        module.forward = answer  # type: ignore[method-assign]
    try:
        with suppress(TrialDoneError):
            yield
    finally:
        for module, instance_forward in before.items():
            if instance_forward is None:
                del module.forward
            else:
                module.forward = instance_forward  # type: ignore[method-assign]


@contextmanager
def trial(answers: Mapping[nn.Module, Answer], weights: Iterable[Place] = ()) -> Iterator[None]:
    """Context manager: answer calls of modules as `answering` does, read these weights, and compile nothing.

    The masks of flex_attention are otherwise compiled, for half a minute, to be looked at once.
    """
    with in_place(weights), torch.compiler.set_stance("force_eager"), answering(answers):
        yield


def answers_of(blocks: Iterable[nn.Module], answer: Answer) -> dict[nn.Module, Answer]:
    """Return answers for blocks that call one function, with the index of the block before its arguments."""

    def of_block(index: int) -> Answer:
        # A plain function, because a deep copy of a module also copies whatever a bound method or a partial function refers to.
        return lambda *args, **kwargs: answer(index, *args, **kwargs)

    return {module: of_block(index) for index, module in enumerate(blocks)}


def outer_weights(
    parts: ModelParts,
    make: Callable[[ParamRef], torch.Tensor],
    left_out: Collection[str] = (),
    units: Iterable[Unit] = (OUTER,),
) -> Iterator[Place]:
    """Yield a tensor for each parameter of some units of a model, made by a function, with the places that it is read from."""
    for ref in (ref for unit in units for ref in parts.units[unit]):
        if ref.name not in left_out:
            tensor = make(ref)
            yield from ((module, attribute, tensor) for module, attribute in ref.places)


class Decoded:
    """A stand-in for the output of any trunk, with hidden states only: all else in it is None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):  # Python's own, by which code finds out what an object is
            raise AttributeError(name)
        return None


def hidden_of(output: Any) -> torch.Tensor:
    """Return the hidden states (B, T, H) in a trunk's output."""
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
    return hidden
