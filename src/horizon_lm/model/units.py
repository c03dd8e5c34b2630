"""Find the units of a Hugging Face decoder, and reject models that cannot be streamed exactly."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from horizon_lm.common.ranges import consecutive
from horizon_lm.common.units import EMBED, HEAD, IDLE, OUTER, Unit, block
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model.adapter_kinds import adapter_params, is_adapter_layer
from horizon_lm.model.opening import created_in_float32, kept_in_float32
from horizon_lm.model.parts import ModelParts, ParamRef
from horizon_lm.model.towers import find_towers

TRAINED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of weights that can be trained
_FINAL_NORM_NAMES = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "final_norm", "norm_f", "ln_out")


def find_parts(model: Any) -> ModelParts:
    """Find the parts of a model.

    Raises:
        ModelNotSupportedError: the model is not a decoder with a list of blocks and a head, or cannot be streamed exactly.
    """
    name = type(model).__name__
    head, classifies = _find_head(name, model)
    prefix, block_list = find_blocks(model)
    decoder = model.get_submodule(prefix.rpartition(".")[0])
    towers = find_towers(model, block_list)
    lists = [*towers.items(), (prefix, block_list)]
    blocks = {f"{path}.{index}": module for path, modules in lists for index, module in enumerate(modules)}
    _reject_cross_layer_state(name, model)
    embed = model.get_input_embeddings()
    final_norm = next((m for n, m in decoder.named_children() if n in _FINAL_NORM_NAMES and _is_norm(m)), None)

    tables = _find_tables(name, embed)
    _reject_unusual_tables(name, tables)
    tied = _active_projection(head)._parameters.get("weight") is tables[0]._parameters.get("weight")
    adapted = adapter_params(model)
    units, adapters = _find_units(name, model, list(blocks.values()), embed, tables, head, tied, adapted)
    if len(units[EMBED]) != 1 or (tables[0], "weight") not in units[EMBED][0].places:
        raise ModelNotSupportedError(f"{name}: the input embedding is not one table of rows, which streaming needs")
    _reject_encoder(name, model, block_list)
    if tied and units[HEAD]:
        raise ModelNotSupportedError(
            f"{name}: PEFT trains a copy of the head, or adapters of it, and ties it to the embedding; leave ensure_weight_tying out"
        )
    return ModelParts(
        _model=model, decoder=decoder, blocks=list(blocks.values()), block_names=list(blocks), embed=embed, tables=tables, head=head,
        final_norm=final_norm, units=units, tied=tied, classifies=classifies, adapters=adapters, is_adapted=bool(adapted),
        in_float32=_find_in_float32(model, units, adapted), towers=[range(each.start, each.stop) for each in consecutive(map(len, towers.values()))],
    )  # fmt: skip


def _find_tables(name: str, embed: nn.Module) -> list[nn.Module]:
    """Return the modules of the input embedding that have a table: itself, or the copies inside PEFT's layer around it.

    The first one is the trained copy or, if none is trained, the copy in use.

    Raises:
        ModelNotSupportedError: PEFT computes with the whole table (DoRA), or trains several copies.
    """
    if not is_adapter_layer(embed):
        return [embed]
    if any(any(getattr(layer, "use_dora", {}).values()) for layer in embed.modules()):
        raise ModelNotSupportedError(
            f"{name}: DoRA of the input embedding is not streamed, because it computes with the whole table; use LoRA"
        )
    tables = [module for module in embed.modules() if isinstance(module, nn.Embedding)]
    copies: Any = getattr(embed, "modules_to_save", None) or {}
    active = [copies[each] for each in getattr(embed, "active_adapters", ()) if each in copies]
    with torch._C.DisableTorchFunctionSubclass():
        trained = [module for module in tables if module.weight.requires_grad]
    if len(trained) > 1:
        raise ModelNotSupportedError(f"{name}: several copies of the input embedding are trained; train one of them")
    first = (trained or active or tables)[:1]
    return [*first, *(module for module in tables if module not in first)]


def _reject_unusual_tables(name: str, tables: list[nn.Module]) -> None:
    """Raise ModelNotSupportedError if an embedding table has sparse gradients, or is changed by a lookup."""
    if any(getattr(each, "sparse", False) or getattr(each, "max_norm", None) is not None for each in tables):
        raise ModelNotSupportedError(
            f"{name}: an input embedding with sparse gradients or max_norm is not streamed; set sparse=False and max_norm=None"
        )


def _find_head(name: str, model: Any) -> tuple[nn.Module, bool]:
    """Return the model's output projection, and whether it is the `score` of a classifier."""
    head = model.get_output_embeddings() if callable(getattr(model, "get_output_embeddings", None)) else None
    if head is not None:
        return head, False
    # The name is the convention of transformers' decoders; encoders have a `classifier` after a pooling layer.
    score: Any = getattr(model, "score", None)
    if score is not None and type(_active_projection(score)) is nn.Linear:
        return score, True
    raise ModelNotSupportedError(
        f"{name} has neither the output embeddings of a causal language model nor the `score` of a decoder that classifies "
        "rows. Load a decoder with AutoModelForCausalLM or AutoModelForSequenceClassification."
    )


def _active_projection(head: nn.Module) -> nn.Module:
    """Return the projection that a head multiplies by, inside PEFT's layers around it."""
    while is_adapter_layer(head):
        copies: Any = getattr(head, "modules_to_save", None) or {}  # of a head that is trained as a whole, by adapter
        active = [copies[each] for each in getattr(head, "active_adapters", ()) if each in copies]
        if active:
            head = active[0]
        elif (tokens := getattr(head, "token_adapter", None)) is not None:  # a head of which some tokens are trained
            head = tokens
        else:  # LoRA, or a copy that is not in use
            head = getattr(head, "base_layer", None) or head.original_module  # type: ignore[assignment]
    return head


def _find_units(
    name: str, model: Any, blocks: Sequence[nn.Module], embed: nn.Module, tables: list[nn.Module], head: nn.Module, tied: bool,
    adapted: set[int],
) -> tuple[dict[Unit, list[ParamRef]], dict[int, frozenset[str]]]:  # fmt: skip
    """Return the parameters by unit, in the order of the model, and the names of adapters in each block, as in `ModelParts`."""
    # The unit of each module, by identity. A later line overrides earlier ones, because a module may be in several units.
    owner: dict[int, Unit] = {id(module): block(i) for i, b in enumerate(blocks) for module in b.modules()}
    if adapted:
        _reject_shared_modules(name, model, blocks, owner)
    owner |= {id(module): HEAD for module in head.modules()}
    # PEFT's adapters of the embedding are small, and a head may share them.
    owner |= {id(module): OUTER if is_adapter_layer(embed) else EMBED for module in embed.modules()}
    owner |= {id(tables[0]): EMBED} | {id(module): IDLE for module in tables[1:]}
    adapters: dict[int, set[str]] = {}
    units: dict[Unit, list[ParamRef]] = {unit: [] for unit in (EMBED, *map(block, range(len(blocks))), HEAD, OUTER)}
    if len(tables) > 1:
        units[IDLE] = []
    for ref in _find_params(name, model):
        owners = {owner.get(id(module), OUTER) for module, _ in ref.places}
        if id(ref.param) in adapted and len(owners) == 1 and all(unit.is_block for unit in owners):
            (unit,) = owners
            units[OUTER].append(ref)
            adapters.setdefault(unit.block_index, set()).add(ref.name)
        else:
            is_head_weight = (head, "weight") in ref.places
            units[_unit_of(name, ref, owners, tied, is_head_weight)].append(ref)
    return units, {index: frozenset(names) for index, names in adapters.items()}


def _find_params(name: str, model: Any) -> Iterable[ParamRef]:
    """Return the parameters of a model, each with all of its places; raise ModelNotSupportedError for one that is not plain."""
    refs: dict[int, ParamRef] = {}
    for module_name, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is None:
                continue
            is_plain = type(param) is nn.Parameter or getattr(param, "is_packed", False)
            if not is_plain or param.dtype not in TRAINED_DTYPES:
                raise ModelNotSupportedError(
                    f"{name}: {module_name}.{attribute} is a {type(param).__name__} of {param.dtype}; quantized weights "
                    "are not streamed. Load the model in bf16 or float32."
                )
            ref = refs.setdefault(id(param), ParamRef(f"{module_name}.{attribute}".removeprefix("."), param, []))
            ref.places.append((module, attribute))
    return refs.values()


def _unit_of(name: str, ref: ParamRef, owners: set[Unit], tied: bool, is_head_weight: bool) -> Unit:
    """Return the unit of a parameter, whose places may be in several.

    Args:
        name: the model's class, for the message.
        ref: the parameter.
        owners: the units of the modules that have it; at least one.
        tied: the head uses the embedding table.
        is_head_weight: it is the weight of the head's own module.

    Raises:
        ModelNotSupportedError: it is shared by modules that are computed at different times.
    """
    if EMBED in owners and owners <= {EMBED, HEAD}:
        return EMBED
    if (owners == {HEAD} and tied) or (owners == {OUTER, HEAD} and not is_head_weight):
        return OUTER  # a bias of a tied head, or a parameter of a module around the head
    if owners == {IDLE, HEAD}:
        return HEAD  # the original table of a tied head, of which PEFT trains a copy
    if len(owners) == 1 and (len(ref.places) == 1 or owners == {OUTER}):
        return next(iter(owners))
    raise ModelNotSupportedError(
        f"{name}: {ref.name} is one parameter in {len(ref.places)} places; only the head may be tied to the embedding, "
        "and parameters outside of blocks to each other"
    )


def _find_in_float32(model: Any, units: Mapping[Unit, list[ParamRef]], adapted: set[int]) -> frozenset[str]:
    """Return the weights, by full name, that are in float32 because transformers keeps them so in a model that it opens in bfloat16.

    Weights that other code has converted to float32, such as norms or the head, are not among them; nor are embedding tables and adapters.
    """
    without_tables = [refs for unit, refs in units.items() if unit not in (EMBED, IDLE)]
    refs = [ref for of_unit in without_tables for ref in of_unit if id(ref.param) not in adapted]
    # Looked up by their names without PEFT, which transformers' rules expect.
    names = {ref.name.replace(".base_layer.", "."): ref.name for ref in refs if ref.param.dtype == torch.float32}
    kept = kept_in_float32(model, names, torch.bfloat16)
    others = names.keys() - kept
    # If all weights are in float32, the whole model was opened so, and the weights that its code creates in float32 are no exception.
    if others and any(ref.param.dtype != torch.float32 for ref in refs):
        kept |= created_in_float32(model, others)
    return frozenset(names[name] for name in kept)


def _reject_shared_modules(name: str, model: Any, blocks: Sequence[nn.Module], owner: Mapping[int, Unit]) -> None:
    """Raise ModelNotSupportedError if a module with parameters is in several blocks, as in some methods of PEFT."""
    inside = [(block(i), module) for i, each in enumerate(blocks) for module in each.modules()]
    shared = {
        id(module)
        for unit, module in inside
        if owner[id(module)] != unit and any(param is not None for param in module._parameters.values())
    }  # `owner` has the last of the blocks that a module is in
    paths = [path for path, module in model.named_modules() if id(module) in shared]
    if paths:
        raise ModelNotSupportedError(
            f"{name}: the parameters of {paths[0]} are in several blocks, each of which would train its own; use a method of "
            "PEFT that shares nothing between blocks, such as LoRA"
        )


def find_blocks(model: Any) -> tuple[str, nn.ModuleList]:
    """Return the name of the list of decoder blocks, and the list. It is found by the classes of its entries, its length, or its place.

    Raises:
        ModelNotSupportedError: the model has no such list.
    """
    name, decoder = type(model).__name__, model.get_decoder()
    layers: Any = getattr(decoder, "layers", None)
    if layers is not None and len(layers) == 0:
        raise ModelNotSupportedError(f"{name} has no decoder blocks")
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    classes = set(getattr(model, "_no_split_modules", None) or ())
    lists = [(path, each) for path, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each)]
    within = [(path, each) for path, each in lists if any(each is part for part in decoder.modules())] or lists
    named = [(path, each) for path, each in within if {type(entry).__name__ for entry in each} <= classes]
    as_deep = [(path, each) for path, each in within if len(each) == depth]
    inner = {id(part) for _, each in within for entry in each for part in entry.modules()}
    outermost = [(path, each) for path, each in within if id(each) not in inner]
    # From the surest to the least sure; the first of these that is unambiguous is taken.
    for candidates in ([found for found in named if found in as_deep], named, as_deep, outermost):
        if len(candidates) == 1:
            return candidates[0]
    raise ModelNotSupportedError(
        f"{name}: no list of {depth} decoder blocks was found, so there is nothing to stream by"
    )


def _reject_cross_layer_state(name: str, model: Any) -> None:
    """Raise ModelNotSupportedError if blocks use the state of other blocks or of an encoder."""
    config = model.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ModelNotSupportedError(f"{name} has an encoder or cross-attention; only decoders are streamed")
    if getattr(config, "num_kv_shared_layers", 0):
        raise ModelNotSupportedError(
            f"{name} shares keys and values between layers (num_kv_shared_layers="
            f"{config.num_kv_shared_layers}); streaming it block by block would give wrong gradients"
        )


def _reject_encoder(name: str, model: Any, blocks: nn.ModuleList) -> None:
    """Raise ModelNotSupportedError for a model in which tokens attend to later ones, such as a BERT as it is published."""
    # Configs of some decoders have the setting, too, but the code of their blocks does not read it.
    if getattr(model.config.get_text_config(), "is_decoder", True) or not _code_reads(blocks[0], "is_decoder"):
        return
    raise ModelNotSupportedError(
        f"{name} is an encoder (is_decoder is false in its config): each token sees the later ones that it would learn to predict. Load a "
        "decoder, or set is_decoder to true in the config to train this one as a decoder."
    )


def _code_reads(block: nn.Module, name: str) -> bool:
    """Return whether the code of a block or of a part of it uses an attribute of this name."""
    classes = {cls for module in block.modules() for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
    functions = [inspect.unwrap(each) for cls in classes for each in vars(cls).values() if inspect.isfunction(each)]
    return any(name in function.__code__.co_names for function in functions)


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module has parameters of its own, and none in modules inside it."""
    own = list(module.parameters(recurse=False))
    return bool(own) and len(own) == len(list(module.parameters()))
