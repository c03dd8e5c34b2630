"""The calls of random sequences; each call is made on a streamed and on a plain model."""

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from tests.seams.fuzz_worlds import World
from tests.seams.rows.weights import EDITS
from tests.seams.use import copied_weights
from tests.support import tiny_models


@dataclass(frozen=True)
class Kind:
    """A kind of call, and its relative frequency."""

    make: Callable[[World, random.Random], Any]
    weight: int
    never_rejected: bool


CALLS: dict[str, Kind] = {}


def _call(weight: int, never_rejected: bool = True) -> Callable[[Callable[[World, random.Random], Any]], Any]:
    def add(make: Callable[[World, random.Random], Any]) -> Any:
        CALLS[make.__name__.strip("_")] = Kind(make, weight, never_rejected)
        return make

    return add


def _batch(chosen: random.Random) -> dict[str, torch.Tensor]:
    padding = chosen.choice(("right", "left", "none"))
    return tiny_models.batch(chosen.choice((2, 3)), chosen.choice((5, 11)), padding, chosen.randrange(100))


# Parts of a step


@_call(4)
def forward(world: World, chosen: random.Random) -> Any:
    value = world.model(**_batch(chosen)).loss
    if len(world.pending) < 2 and value.requires_grad:
        world.pending.append(value)
    return float(value.detach())


@_call(4, never_rejected=False)
def backward(world: World, chosen: random.Random) -> Any:
    if not world.pending:
        return None
    place = chosen.randrange(len(world.pending))
    world.pending.pop(place).backward()
    return None


@_call(10)
def accumulate(world: World, chosen: random.Random) -> Any:
    value = world.model(**_batch(chosen)).loss
    if value.requires_grad:
        (value / chosen.choice((1, 4))).backward()
    return float(value.detach())


@_call(6)
def step(world: World, chosen: random.Random) -> Any:
    world.optimizer.step()
    if chosen.random() < 0.7:
        world.optimizer.zero_grad()
    return None


@_call(3)
def step_of_another(world: World, chosen: random.Random) -> Any:
    world.sgd.step()
    if chosen.random() < 0.7:
        world.sgd.zero_grad()
    return None


@_call(3)
def zero_grad(world: World, chosen: random.Random) -> Any:
    how = chosen.randrange(4)
    if how == 0:
        world.model.zero_grad()
    elif how == 1:
        world.optimizer.zero_grad()
    else:
        for param in world.model.parameters():
            if how == 2:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()
    return None


@_call(2)
def clip(world: World, chosen: random.Random) -> Any:
    return float(nn.utils.clip_grad_norm_(world.model.parameters(), 0.1))


@_call(1)
def scale_gradients(world: World, chosen: random.Random) -> Any:
    for param in world.model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)
    return None


# Without gradients


@_call(5)
def evaluate(world: World, chosen: random.Random) -> Any:
    model, inference = world.model, chosen.random() < 0.4
    model.eval()
    with torch.inference_mode() if inference else torch.no_grad():
        value = float(model(**_batch(chosen)).loss)
    model.train()
    return value


@_call(2)
def generate(world: World, chosen: random.Random) -> Any:
    batch = _batch(chosen)
    world.model.eval()
    try:
        return world.model.generate(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=3, pad_token_id=0,
            do_sample=chosen.random() < 0.3,
        ).tolist()  # fmt: skip
    finally:
        world.model.train()


@_call(2)
def save(world: World, chosen: random.Random) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        world.model.save_pretrained(folder)
        return {name: value for path in Path(folder).glob("*.safetensors") for name, value in load_file(path).items()}


@_call(2)
def keep(world: World, chosen: random.Random) -> Any:
    world.saved = copied_weights(world.model)
    return world.saved


@_call(2)
def load(world: World, chosen: random.Random) -> Any:
    if world.saved is not None:
        world.model.load_state_dict(world.saved)
    return None


@_call(2)
def read(world: World, chosen: random.Random) -> Any:
    param = world.parameter(chosen)
    return [lambda: param.data.clone(), lambda: param.detach().sum(), lambda: param.norm().detach()][
        chosen.randrange(3)
    ]()


# Changes


@_call(6)
def edit(world: World, chosen: random.Random) -> Any:
    EDITS[chosen.choice([how for how in EDITS if how != "init"])](world.parameter(chosen))
    return None


@_call(2)
def freeze(world: World, chosen: random.Random) -> Any:
    params = list(world.model.parameters())
    if sum(p.requires_grad for p in params) > 5:
        world.pending.clear()
        chosen.choice(params).requires_grad_(False)
    return None


@_call(1, never_rejected=False)
def unfreeze(world: World, chosen: random.Random) -> Any:
    frozen = [p for p in world.model.parameters() if not p.requires_grad]
    if not frozen:
        return None
    param = chosen.choice(frozen)
    param.requires_grad_(True)
    world.pending.clear()
    try:
        return accumulate(world, chosen)
    except Exception:
        param.requires_grad_(False)
        raise


@_call(2)
def hook(world: World, chosen: random.Random) -> Any:
    module, how = world.linear(chosen), chosen.randrange(3)
    world.pending.clear()
    if how == 0:
        handle = module.register_forward_hook(lambda module, inputs, output: output * 1.1)
    elif how == 1:
        handle = module.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.9, *inputs[1:]))
    else:
        handle = module.register_full_backward_hook(
            lambda module, grads, outputs: tuple(None if g is None else g * 1.1 for g in grads)
        )
    world.handles.append(handle)
    return None


@_call(1)
def hook_after_gradients(world: World, chosen: random.Random) -> Any:
    def halve(param: Any) -> None:
        param.grad.mul_(0.5)

    param = world.parameter(chosen)
    if param.requires_grad:
        world.handles.append(param.register_post_accumulate_grad_hook(halve))


@_call(1)
def remove_hook(world: World, chosen: random.Random) -> Any:
    if world.handles:
        world.pending.clear()
        world.handles.pop(chosen.randrange(len(world.handles))).remove()
    return None


@_call(1)
def dropout(world: World, chosen: random.Random) -> Any:
    rate = chosen.choice((0.0, 0.3))
    world.pending.clear()
    for module in world.model.modules() if world.draws else ():
        if isinstance(module, nn.Dropout):
            module.p = rate
        elif hasattr(module, "attention_dropout"):
            module.attention_dropout = rate
    return None


@_call(1)
def attention(world: World, chosen: random.Random) -> Any:
    world.pending.clear()
    world.model.set_attn_implementation(chosen.choice(("eager", "sdpa")))
    return None


@_call(1)
def attribute(world: World, chosen: random.Random) -> Any:
    block = chosen.choice(list(world.blocks))
    world.pending.clear()
    for module in block.modules():
        for name in ("variance_epsilon", "eps"):
            if name in module.__dict__:
                setattr(module, name, 0.1)
    return None


# Calls that are rejected or work


@_call(1, never_rejected=False)
def cast(world: World, chosen: random.Random) -> Any:
    target = chosen.choice([world.model, world.linear(chosen), world.model.get_output_embeddings()])
    world.pending.clear()
    ways = [lambda: target.half(), lambda: target.to(torch.float64), lambda: target.type(torch.float64)]
    if (
        target is world.model
    ):  # on a module it replaces parameters, which the next forward pass rejects: see replace_parameter
        ways.append(lambda: target.to("meta"))
    chosen.choice(ways)()
    return accumulate(world, chosen)


@_call(1, never_rejected=False)
def replace_data(world: World, chosen: random.Random) -> Any:
    param = world.parameter(chosen)
    before = param.data
    world.pending.clear()
    try:
        param.data = before * 0.5
        return accumulate(world, chosen)
    finally:
        param.data = before


@_call(1, never_rejected=False)
def replace_parameter(world: World, chosen: random.Random) -> Any:
    module = world.linear(chosen)
    name = chosen.choice([name for name, param in module._parameters.items() if param is not None])
    before = module._parameters[name]
    world.pending.clear()
    try:
        setattr(module, name, nn.Parameter(before.detach() * 0.5))
        return accumulate(world, chosen)
    finally:
        setattr(module, name, before)


@_call(1, never_rejected=False)
def parameter_hook(world: World, chosen: random.Random) -> Any:
    param = world.parameter(chosen)
    if not param.requires_grad:
        return None
    handle = param.register_hook(lambda grad: grad * 2)
    try:
        return accumulate(world, chosen)
    finally:
        handle.remove()


@_call(1, never_rejected=False)
def backward_of_some(world: World, chosen: random.Random) -> Any:
    param = world.parameter(chosen)
    value = world.model(**_batch(chosen)).loss
    if param.requires_grad:
        value.backward(inputs=[param])
    return float(value.detach())


@_call(1, never_rejected=False)
def grad_of_some(world: World, chosen: random.Random) -> Any:
    param = world.parameter(chosen)
    value = world.model(**_batch(chosen)).loss
    return torch.autograd.grad(value, param)[0] if param.requires_grad else None


# Errors in other code


@_call(1)
def bad_tokens(world: World, chosen: random.Random) -> Any:
    batch = _batch(chosen)
    batch["input_ids"][0, 0] = 10**6
    try:
        return float(world.model(**batch).loss)
    except IndexError:
        return "an IndexError"


class _OfOthersError(Exception):
    pass


@_call(2)
def error_in_a_hook(world: World, chosen: random.Random) -> Any:
    def fail(*args: Any) -> None:
        raise _OfOthersError("an error of somebody else")

    module, backwards = world.linear(chosen), chosen.random() < 0.5
    handle = module.register_full_backward_hook(fail) if backwards else module.register_forward_hook(fail)
    try:
        return accumulate(world, chosen)
    finally:
        handle.remove()


NEVER_REJECTED = frozenset(name for name, kind in CALLS.items() if kind.never_rejected)
