"""Take in adapters that PEFT has added to a streamed model, and drop those that it has replaced or removed.

PEFT changes the layers of a model in place: ``get_peft_model(stream(model), config)``, ``add_adapter``, ``delete_adapter``,
``PeftModel.from_pretrained``. The next use of the streamed model notices it, finds the units again, moves the new
parameters into the store, and attaches the model again. Weights of the base keep their memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from horizon_lm.common.units import OUTER
from horizon_lm.distributed.alike import copy_from_first
from horizon_lm.distributed.mesh import Mesh
from horizon_lm.distributed.whole_units import sharing_moved
from horizon_lm.engine.calls.model_forward import ModelForward
from horizon_lm.engine.host.packed_parameters import PackedParameter
from horizon_lm.engine.host.parameters import StreamedParameter, landing_grad
from horizon_lm.engine.opening.moving import move_in
from horizon_lm.engine.opening.options import StreamArguments
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.trained_parameters import trains_other_adapters
from horizon_lm.errors import StreamingError
from horizon_lm.memory.layout.ranks import used_bytes
from horizon_lm.memory.precision import Precision
from horizon_lm.memory.store import Store
from horizon_lm.model.adapter_kinds import adapter_params
from horizon_lm.model.examination import Examined
from horizon_lm.model.parts import ModelParts


def are_adapters_changed(horizon: ModelForward) -> bool:
    """Return whether PEFT has added, removed or swapped adapters, or switched to one that was not trained before, and other
    code has changed no other parameter.
    """
    if not horizon.replaced.is_structure_changed():  # PEFT may have switched to other adapters
        return _trains_others(horizon)
    now = {id(param) for param in horizon.model.parameters()}
    before = {id(ref.param) for ref in horizon.engine.refs.values()}
    # The same parameters in other modules: PEFT does this when it merges norms. Without adapters it was other code.
    if now == before:
        return bool(horizon.adapter_params)
    # Other changes are not taken in: the forward pass rejects them with its own message.
    return now - before <= adapter_params(horizon.model) and before - now <= horizon.removable_params


def empty_adapters(model: Any) -> set[str]:
    """Return the full names of adapters that have no values yet, because PEFT added them with `low_cpu_mem_usage`."""
    without_values = [name for name, param in model.named_parameters() if param.is_meta]
    adapters = adapter_params(model) if without_values else set()
    return {name for name in without_values if id(model.get_parameter(name)) in adapters}


def _trains_others(horizon: ModelForward) -> bool:
    """Return whether the next pass would train adapters for which the engine has no gradients."""
    # Without gradients, an adapter is active for a moment: the reference of preference trainers, for example.
    return torch.is_grad_enabled() and trains_other_adapters(horizon.engine)


def take_in_adapters(horizon: ModelForward, arguments: StreamArguments) -> tuple[Examined, Store]:
    """Move a model whose adapters have changed into a new store. Return the units of the model and that store, for `attach`. Its engine
    is retired, and the optimizers with it.

    After an error before weights move, the model is the streamed one that it was. Later errors are final.

    Args:
        horizon: the model's forward pass so far.
        arguments: the arguments of `horizon_lm.stream`.

    Raises:
        StreamingError: new adapters have no values, gradients are held, or an optimizer updates in the backward pass.
        ModelNotSupportedError: the model cannot be streamed exactly with these adapters.
    """
    model, engine, mesh = horizon.model, horizon.engine, horizon.engine.mesh
    if empty_adapters(model):
        raise StreamingError(
            "adapters that were added with low_cpu_mem_usage=True have no values yet; load them with "
            "peft.set_peft_model_state_dict(model, values, low_cpu_mem_usage=True) first, or leave low_cpu_mem_usage out"
        )
    _require_between_steps(engine)
    # Slabs move and device buffers are freed below, so nothing may read or write them any more.
    engine.drain()
    with _detaching(horizon):
        examined = arguments.examine(model)
        parts = examined.parts
        store, old_names = _extend_store(engine, parts, arguments.get_precision(parts))
    # PEFT has drawn the values of new adapters on each rank, without a common seed.
    copy_from_first(mesh, {ref.name: ref.param.data for ref in parts.refs() if ref.name not in old_names})
    # A rank has a range of the old slabs only, and `master` reads whole weights.
    with sharing_moved(mesh, store, engine.store, old_names):
        for ref in parts.refs():
            old = engine.name_of(ref.param)
            move_in(ref, store, None if old is None else partial(engine.store.master, old))
    _drop_empty_low_halves(store, mesh)
    # Before the new engine takes buffers: the device may not have room for both.
    engine.retire(store)
    return examined, store


def _require_between_steps(engine: Engine) -> None:
    """Raise StreamingError if an optimizer or gradients belong to the adapters that the model had."""
    if engine.updates.optimizer_in_backward is not None:
        raise StreamingError(
            "adapters were added, removed or switched after an optimizer with update_in_backward was created; change the "
            "adapters first"
        )
    if any(landing_grad(ref.param) is not None for ref in engine.refs.values()):
        raise StreamingError(
            "adapters were added, removed or switched while gradients are held; call optimizer.step() and zero_grad() before, or "
            "model.zero_grad() now"
        )


@contextmanager
def _detaching(horizon: ModelForward) -> Iterator[None]:
    """Context manager: make the model an ordinary one, whose parameters are views into the store. On success the caller attaches it again;
    after an error the streamed model is restored.
    """
    model, streamed_class = horizon.model, type(horizon.model)
    # Replaced forwards and streamed parameters would be taken for the model's own when it is examined.
    horizon.replaced.restore()
    model.__class__ = horizon.model_class
    # Placeholders stay what they are: as plain parameters their memory would be read as values.
    for param in {id(param): param for param in model.parameters()}.values():
        if isinstance(param, StreamedParameter) and not isinstance(param, PackedParameter):
            param.__class__ = nn.Parameter  # type: ignore[assignment]
    try:
        yield
    except BaseException:  # also an interrupt must leave a model that goes on
        horizon.engine.access.adopt_parameters()
        model.__class__ = streamed_class
        horizon.replaced.replace()
        raise


def _extend_store(engine: Engine, parts: ModelParts, precision: Precision) -> tuple[Store, dict[str, str]]:
    """Return a new store for a model with other adapters, and the old names of its weights by the new ones. Set the codecs of ``parts``."""
    old, old_names = engine.store, parts.old_names(engine.parts)
    frozen = set(parts.frozen_base())
    if precision.low_half:
        # A base without low halves does not get them back; adapters (OUTER) keep theirs, also while they are not trained.
        without_low = (unit for unit, slabs in old.units.items() if slabs.plain.low is None)
        frozen |= {unit for unit in without_low if old.units[unit].layout.buffers[0].numel} - {OUTER}
        if old.units[OUTER].plain.low is not None:
            frozen.discard(OUTER)
    store = old.extended(parts.shapes(), old_names, precision, frozen)
    parts.codecs = store.codecs
    parts.in_float32 = engine.parts.renamed_in_float32(old_names)
    # Whoever remembers a version of the weights must not find it again.
    store.version, store.block_version = old.version + 1, old.block_version + 1
    return store, old_names


def _drop_empty_low_halves(store: Store, mesh: Mesh) -> None:
    """Free the low 16 bits of the fp32 masters of a base that is frozen now, if all are zero, as they are for bf16 checkpoints. All ranks
    call this.
    """
    slabs = [store.units[unit].plain for unit in store.frozen]
    low_halves = [(each, each.low) for each in slabs if each.low is not None]
    has_bits = any(bool(low[each.own].any()) for each, low in low_halves)
    # Each rank has a part of them, and all drop theirs, or none.
    if any(mesh.exchange("the low halves of a base", has_bits)):
        return
    for each, low in low_halves:
        store.num_bytes["low_halves"] -= used_bytes([each.own], low.dtype.itemsize)
        each.low = None
