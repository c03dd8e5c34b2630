"""Fill a store: move a model into it, put a skeleton's parameters there, draw new ones, and add adapters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from horizon_lm.distributed.alike import copy_from_first
from horizon_lm.distributed.whole_units import sharing_moved
from horizon_lm.engine.host.packed_parameters import PackedParameter
from horizon_lm.engine.host.parameters import require_plain
from horizon_lm.engine.opening.attaching import attach
from horizon_lm.engine.opening.moving import move_in
from horizon_lm.engine.opening.options import StreamArguments
from horizon_lm.engine.opening.quantized_opening import FindCodecs
from horizon_lm.engine.opening.same_weights import require_alike
from horizon_lm.engine.opening.streamed_model import StreamedModel
from horizon_lm.errors import ConfigError, StreamingError
from horizon_lm.memory.store import Store
from horizon_lm.model.adapter_kinds import adapted_model, require_adapters_that_stream
from horizon_lm.model.adapters import Adapters
from horizon_lm.model.examination import Examined
from horizon_lm.model.parts import ModelParts, ParamRef


def with_store(
    model: Any, settings: StreamArguments, frozen: bool = False, find_codecs: FindCodecs | None = None,
    in_bfloat16: bool = False,
) -> tuple[Examined, Store]:  # fmt: skip
    """Create a store for a skeleton on the meta device, whose parameters become views into it. Return its units and the store.

    Args:
        model: the skeleton.
        settings: arguments of the caller.
        frozen: no weight will be trained, so there are no low halves.
        find_codecs: function that returns the codecs of quantized weights; None if there are none.
        in_bfloat16: the weights come in bfloat16, so that units which are not trained need no low halves.
    """
    examined = settings.examine(model)
    parts = examined.parts
    if find_codecs is not None:
        parts.quantize(find_codecs(parts))
    never_trained = set(parts.units) if frozen else parts.frozen_base()
    store = Store(
        parts.shapes(), settings.get_precision(parts), never_trained, codecs=parts.codecs, shard=settings.device_mesh.shard,
        in_float32=parts.in_float32, exact=parts.untrained() if in_bfloat16 else (),
    )  # fmt: skip
    for ref in parts.refs():
        ref.param = (
            PackedParameter.of(store, ref.name)
            if ref.name in store.codecs
            else nn.Parameter(store.weight(ref.name), ref.param.requires_grad)
        )
        # In all places of a tied weight, so that it stays one parameter.
        for module, attribute in ref.places:
            module._parameters[attribute] = ref.param
    return examined, store


def draw(
    model: Any, refs: Sequence[ParamRef], store: Store, device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Initialise the parameters of one unit on a device, and write them to the store. The modules get their own parameters back.

    They are drawn in ``dtype``; None for the store's dtype.
    """
    drawn = {
        ref.name: torch.zeros(ref.param.shape, dtype=dtype or store.weight(ref.name).dtype, device=device)
        for ref in refs
    }
    for ref in refs:
        for module, attribute in ref.places:
            module._parameters[attribute] = nn.Parameter(drawn[ref.name], requires_grad=False)
    # A module's whole initialisation runs, so that its parameters are drawn together, as in transformers.
    for module in {id(m): m for ref in refs for m, _ in ref.places}.values():
        model._init_weights(module)
    for ref in refs:
        # `save_pretrained` writes a weight in the dtype that it came in.
        store.source_dtypes[ref.name] = drawn[ref.name].dtype
        store.write(ref.name, drawn[ref.name])
        for module, attribute in ref.places:
            module._parameters[attribute] = ref.param


def add_adapters(adapters: Adapters, base: ModelParts, store: Store, settings: StreamArguments) -> Any:
    """Add adapters to a model that is not attached yet, attach it to its device, and return the PEFT model.

    The memory of ``store``, which has the weights of ``base``, goes over to the store of the adapted model.
    """
    mesh = settings.device_mesh
    if mesh.size > 1 and adapters.setting_that_copies:
        raise ConfigError(
            f"{adapters.setting_that_copies} is not supported with several processes: the new values are computed from weights, of which "
            "each process has a part; add the adapters with one process, save them, and open their folder"
        )
    model = adapters.add_to(base.model, draw=True)
    if mesh.size > 1:
        # Without the path of the base, which may be another one on each machine.
        configs = {name: each.to_dict() | {"base_model_name_or_path": ""} for name, each in model.peft_config.items()}
        require_alike(mesh, Path(adapters.folder or "adapters"), {"config of the adapters": configs})
    # Units are found again, because the adapters belong to them now, and only the adapters are trained.
    examined = settings.examine(adapted_model(model))
    parts = examined.parts
    refs, old_names = parts.refs(), parts.old_names(base)
    # New adapters begin with random values, which each rank has drawn for itself.
    copy_from_first(mesh, {ref.name: ref.param.data for ref in refs if ref.name not in old_names})
    extended = store.extended(parts.shapes(), old_names, settings.get_precision(parts), parts.frozen_base())
    parts.codecs = extended.codecs
    # Weights that transformers keeps in float32 are found by names, which PEFT has changed.
    parts.in_float32 = base.renamed_in_float32(old_names)
    with sharing_moved(mesh, extended, store, old_names):
        for ref in refs:
            move_in(ref, extended)
    attach(settings, examined, extended)
    return model


def stream_loaded(model: Any, settings: StreamArguments) -> Any:
    """Move a model's parameters into a new store, and attach the model to a device. Return the model.

    Of a PEFT model, the model inside it is attached: PEFT, and whoever generates, calls that one.
    """
    require_adapters_that_stream(model)
    inside = adapted_model(model)
    if isinstance(inside, StreamedModel):
        raise StreamingError("the model is streamed already")
    examined = settings.examine(inside)
    parts = examined.parts
    # All parameters are checked before the first one moves, so that a model that is rejected stays as it was.
    for ref in parts.refs():
        require_plain(ref.param)
        if ref.param.is_meta:
            raise StreamingError(
                f"{ref.name} has no values (it is on the meta device): load the model without device_map and with its weights, or "
                "open its folder with horizon_lm.from_pretrained"
            )
    # While each rank still has whole parameters: the store has only its own part of each.
    copy_from_first(
        settings.device_mesh, {ref.name: ref.param.data for ref in parts.refs()} | dict(inside.named_buffers())
    )
    store = Store(
        parts.shapes(),
        settings.get_precision(parts),
        parts.frozen_base(),
        shard=settings.device_mesh.shard,
        in_float32=parts.in_float32,
    )
    for ref in parts.refs():
        move_in(ref, store)
    attach(settings, examined, store)
    return model
