"""Find the units of a Hugging Face decoder, and freeze weights that are not trained."""

import difflib
import inspect
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from horizon_lm.codecs.base import Codec
from horizon_lm.codecs.slab import PackedSlab
from horizon_lm.errors import ConfigError, ModelNotSupportedError
from horizon_lm.planning.memory import ModelSizes, PackedSizes
from horizon_lm.units import EMBED, HEAD, IDLE, OUTER, Unit, block

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FINAL_NORM_NAMES = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "final_norm", "norm_f", "ln_out")


@dataclass(slots=True)
class ParamRef:
    """A parameter with all of its places in the module tree."""

    name: str
    param: nn.Parameter
    places: list[tuple[nn.Module, str]]


@dataclass(slots=True)
class ModelParts:
    """The parts of a causal language model, or of a decoder with a `score` (sequence classification, reward models).

    Attributes:
        decoder: module that contains the list of blocks.
        blocks: list of decoder blocks.
        block_prefix: name of the list of blocks in the model.
        embed, head: input embedding and output projection; the head of a classifier is its `score`. PEFT may have wrapped them.
        tables: modules with an embedding table, of which the first is in unit ``embed``. There are several if PEFT trains a copy
            of the embedding: the others, which are not trained, are in ``idle`` or, if tied, in ``head``.
        final_norm: norm between the last block and the head; None if it has no usual name, or is wrapped by PEFT.
        units: parameters by unit, in the order of the model; a tied table belongs to ``embed`` only. Adapters inside blocks
            belong to ``outer``, which stays on the device during a step.
        adapters: full names of the adapters' parameters inside each block.
        is_adapted: the model has PEFT's adapters, in blocks or elsewhere.
        tied: the head uses the embedding table.
        classifies: the head gives scores of labels, not logits of tokens.
        written: weights that a block's forward pass may write in training, by block.
        codecs: the codecs of quantized weights, by full name; all of blocks.
        in_float32: full names of the weights that transformers keeps in float32 though it opens the model in bfloat16.
    """

    _model: Any
    decoder: nn.Module
    blocks: nn.ModuleList
    block_prefix: str
    embed: nn.Module
    tables: list[nn.Module]
    head: nn.Module
    final_norm: nn.Module | None
    units: dict[Unit, list[ParamRef]]
    tied: bool
    classifies: bool = False
    adapters: Mapping[int, frozenset[str]] = field(default_factory=dict)
    is_adapted: bool = False
    written: Mapping[int, frozenset[str]] = field(default_factory=dict)
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    in_float32: frozenset[str] = frozenset()

    @property
    def model(self) -> Any:
        model = self._model() if isinstance(self._model, weakref.ref) else self._model
        assert model is not None, "the model of these parts is gone"
        return model

    def trunks(self) -> list[nn.Module]:
        """Return the modules around the blocks, outermost first; the model calls one of them for hidden states."""
        names = self.block_prefix.split(".")[:-1]
        return [self.model.get_submodule(".".join(names[:depth])) for depth in range(1, len(names) + 1)]

    def refer_weakly(self) -> None:
        """Refer to the model weakly, because the model now owns these parts."""
        self._model = weakref.ref(self.model)

    def refs(self) -> list[ParamRef]:
        """Return all parameters, unit by unit."""
        return [ref for refs in self.units.values() for ref in refs]

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def head_width(self) -> int:
        """Width of the head's input, which differs from H if a projection follows the blocks."""
        refs = self.units[EMBED] if self.tied else self.units[HEAD]
        return int(refs[0].param.shape[1])

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the head: V, or the number of labels of a classifier."""
        return int(self.units[HEAD][0].param.shape[0]) if self.classifies else self.sizes().vocabulary

    def shapes(self) -> dict[Unit, dict[str, torch.Size]]:
        """Return the shapes of all parameters, by unit and full name."""
        return {unit: {ref.name: ref.param.shape for ref in refs} for unit, refs in self.units.items()}

    @property
    def adapter_names(self) -> frozenset[str]:
        """Full names of the adapters' parameters inside all blocks."""
        return frozenset(name for names in self.adapters.values() for name in names)

    def first_differentiated(self) -> int:
        """Return the first block with a gradient, or the number of blocks if no block has one."""
        norm = {id(p) for p in self.final_norm.parameters()} if self.final_norm else set()
        adapters = {name: u for u, names in self.adapters.items() for name in names}
        before_blocks = (
            ref
            for unit in (EMBED, OUTER)
            for ref in self.units[unit]
            if id(ref.param) not in norm and ref.name not in adapters
        )
        if any(ref.param.requires_grad for ref in before_blocks):
            return 0
        trained = [u for u in range(self.num_blocks) if any(ref.param.requires_grad for ref in self.units[block(u)])]
        trained += [adapters[r.name] for r in self.units[OUTER] if r.name in adapters and r.param.requires_grad]
        return min(trained, default=self.num_blocks)

    def frozen_base(self) -> frozenset[Unit]:
        """Return the units without trainable weights if only adapters are trained in blocks; empty for other models."""
        blocks = {block(u) for u in range(self.num_blocks)}
        frozen = {unit for unit, refs in self.units.items() if not any(ref.param.requires_grad for ref in refs)}
        return frozenset(frozen) if self.is_adapted and blocks <= frozen else frozenset()

    def sizes(self, trained_only: bool = False) -> ModelSizes:
        """Return the numbers of elements of the model's parameters, or only of trainable ones: 0 for the others of their units."""

        def of(refs: Sequence[ParamRef]) -> list[int]:
            counts = [ref.param.numel() if ref.param.requires_grad or not trained_only else 0 for ref in refs]
            return counts if any(counts) else []

        numel = {unit: of(refs) for unit, refs in self.units.items()}
        vocabulary, hidden = self.units[EMBED][0].param.shape
        return ModelSizes(
            blocks=[numel[block(u)] for u in range(self.num_blocks)],
            table=numel[EMBED],
            own_head=[] if self.tied else numel[HEAD],
            outer=numel[OUTER],
            vocabulary=vocabulary,
            hidden=hidden,
            tied=self.tied,
            idle=numel.get(IDLE, []),
            packed=[] if trained_only else self._packed(),
        )

    def _packed(self) -> list[PackedSizes]:
        """Return the sizes of the quantized weights of each block; none if no block has any."""
        if not self.codecs:
            return []
        found = []
        for u in range(self.num_blocks):
            shapes = {ref.name: ref.param.shape for ref in self.units[block(u)] if ref.name in self.codecs}
            slab = PackedSlab(shapes, self.codecs)
            num_bytes = sum(entry.num_bytes for entry in slab.entries.values())
            found.append(PackedSizes([shape.numel() for shape in shapes.values()], num_bytes, slab.num_bytes))
        return found


def find_parts(model: Any) -> ModelParts:
    """Find the parts of a model.

    Raises:
        ModelNotSupportedError: the model is not a decoder with a list of blocks and a head, or cannot be streamed exactly.
    """
    name = type(model).__name__
    head, classifies = _find_head(name, model)
    prefix, blocks = _find_blocks(model, model.get_decoder())
    decoder = model.get_submodule(prefix.rpartition(".")[0])
    _reject_cross_layer_state(name, model, prefix, blocks)
    embed = model.get_input_embeddings()
    final_norm = next((m for n, m in decoder.named_children() if n in _FINAL_NORM_NAMES and _is_norm(m)), None)

    tables = _find_tables(name, embed)
    if any(getattr(each, "sparse", False) or getattr(each, "max_norm", None) is not None for each in tables):
        raise ModelNotSupportedError(
            f"{name}: an input embedding with sparse gradients or max_norm is not streamed; set sparse=False and max_norm=None"
        )
    adapted = adapter_params(model)
    units, adapters = _find_units(name, model, blocks, embed, tables, head, adapted)
    table = next((ref for ref in units[EMBED] if (tables[0], "weight") in ref.places), None)
    if table is None or len(units[EMBED]) != 1:
        raise ModelNotSupportedError(f"{name}: the input embedding is not one table of rows, which streaming needs")
    _reject_encoder(name, model, blocks)
    tied = _inside(head)._parameters.get("weight") is table.param
    if tied and units[HEAD]:
        raise ModelNotSupportedError(
            f"{name}: PEFT trains a copy of the head, or adapters of it, and ties it to the embedding; leave ensure_weight_tying out"
        )
    return ModelParts(
        model,
        decoder,
        blocks,
        prefix,
        embed,
        tables,
        head,
        final_norm,
        units,
        tied,
        classifies,
        adapters,
        bool(adapted),
    )


def _find_tables(name: str, embed: nn.Module) -> list[nn.Module]:
    """Return the modules with a table in the input embedding: itself, or those inside PEFT's layer around it.

    The first is the one that is trained; if none is, the one in use.
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


def _find_head(name: str, model: Any) -> tuple[nn.Module, bool]:
    """Return the model's output projection, and whether it is the `score` of a classifier."""
    head = model.get_output_embeddings() if callable(getattr(model, "get_output_embeddings", None)) else None
    if head is not None:
        return head, False
    # The name is the convention of transformers' decoders; encoders have a `classifier` after a pooling layer.
    score: Any = getattr(model, "score", None)
    if score is not None and type(_inside(score)) is nn.Linear:
        return score, True
    raise ModelNotSupportedError(
        f"{name} has neither the output embeddings of a causal language model nor the `score` of a decoder that classifies "
        "rows. Load a decoder with AutoModelForCausalLM or AutoModelForSequenceClassification."
    )


def _inside(head: nn.Module) -> nn.Module:
    """Return the projection that a head multiplies by, inside PEFT's layers around it."""
    while is_adapter_layer(head):
        copies: Any = getattr(head, "modules_to_save", None) or {}
        active = [copies[each] for each in getattr(head, "active_adapters", ()) if each in copies]
        inside = active[0] if active else getattr(head, "token_adapter", None)
        head = inside if inside is not None else getattr(head, "base_layer", None) or head.original_module  # type: ignore[assignment]
    return head


def _find_units(
    name: str,
    model: Any,
    blocks: nn.ModuleList,
    embed: nn.Module,
    tables: list[nn.Module],
    head: nn.Module,
    adapted: set[int],
) -> tuple[dict[Unit, list[ParamRef]], dict[int, frozenset[str]]]:
    """Return the model's parameters by unit, in the order of the model, and the names of adapters in each block."""
    owner: dict[int, Unit] = {id(module): block(i) for i, b in enumerate(blocks) for module in b.modules()}
    if adapted:
        _reject_shared_modules(name, model, blocks, owner)
    owner |= {id(module): HEAD for module in head.modules()}
    # PEFT's adapters of the embedding are small, and a head may share them.
    owner |= {id(module): OUTER if is_adapter_layer(embed) else EMBED for module in embed.modules()}
    owner |= {id(tables[0]): EMBED} | {id(module): IDLE for module in tables[1:]}
    refs: dict[int, ParamRef] = {}
    for module_name, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is None:
                continue
            is_plain = type(param) is nn.Parameter or getattr(param, "is_packed", False)
            if not is_plain or param.dtype not in _DTYPES:
                raise ModelNotSupportedError(
                    f"{name}: {module_name}.{attribute} is a {type(param).__name__} of {param.dtype}; quantized weights "
                    "are not streamed. Load the model in bf16 or float32."
                )
            ref = refs.setdefault(id(param), ParamRef(f"{module_name}.{attribute}".removeprefix("."), param, []))
            ref.places.append((module, attribute))
    tied = _inside(head)._parameters.get("weight") is tables[0]._parameters.get("weight")
    adapters: dict[int, set[str]] = {}
    names = [EMBED, *(block(i) for i in range(len(blocks))), HEAD, OUTER, *([IDLE] if len(tables) > 1 else [])]
    units: dict[Unit, list[ParamRef]] = {unit: [] for unit in names}
    for ref in refs.values():
        found = {owner.get(id(module), OUTER) for module, _ in ref.places}
        if id(ref.param) in adapted and len(found) == 1 and (user := next(iter(found))).is_block:
            units[OUTER].append(ref)
            adapters.setdefault(user.block_index, set()).add(ref.name)
            continue
        is_head_weight = any(module is head and attribute == "weight" for module, attribute in ref.places)
        if found <= {EMBED, HEAD} and EMBED in found:
            units[EMBED].append(ref)
        elif (found == {HEAD} and tied) or (found == {OUTER, HEAD} and not is_head_weight):
            units[OUTER].append(ref)  # a bias of a tied head, or a parameter of a module around the head
        elif found == {IDLE, HEAD}:
            units[HEAD].append(ref)  # the original table of a tied head, of which PEFT trains a copy
        elif len(found) == 1 and (len(ref.places) == 1 or found == {OUTER}):
            units[found.pop()].append(ref)
        else:
            raise ModelNotSupportedError(
                f"{name}: {ref.name} is one parameter in {len(ref.places)} places; only the head may be tied to the embedding, "
                "and parameters outside of blocks to each other"
            )
    return units, {index: frozenset(names) for index, names in adapters.items()}


def _reject_shared_modules(name: str, model: Any, blocks: nn.ModuleList, owner: Mapping[int, Unit]) -> None:
    """Raise ModelNotSupportedError if a module with parameters is in several blocks, as in some methods of PEFT."""
    inside = [(block(i), module) for i, each in enumerate(blocks) for module in each.modules()]
    shared = {
        id(m) for unit, m in inside if owner[id(m)] != unit and any(p is not None for p in m._parameters.values())
    }
    paths = [path for path, module in model.named_modules() if id(module) in shared]
    if paths:
        raise ModelNotSupportedError(
            f"{name}: the parameters of {paths[0]} are in several blocks, each of which would train its own; use a method of "
            "PEFT that shares nothing between blocks, such as LoRA"
        )


def adapter_params(model: Any) -> set[int]:
    """Return the identities of the parameters of PEFT's adapters, active or not.

    A layer with adapters has the names of its attributes that belong to them in ``adapter_layer_names``, and of others, few
    of which are parameters, in ``other_param_names``.
    """
    parts = (
        getattr(layer, name, None)
        for layer in model.modules()
        if is_adapter_layer(layer)
        for name in (*layer.adapter_layer_names, *getattr(layer, "other_param_names", ()))
    )
    modules = (part for part in parts if isinstance(part, nn.Module))
    return {id(param) for module in modules for param in module.parameters()}


def replaced_params(model: Any) -> set[int]:
    """Return the identities of the base's parameters of which PEFT trains copies, with `modules_to_save` and in norms. They
    are gone when PEFT unloads the adapters, because the copies take their place.
    """
    pairs = (("modules_to_save", "original_module"), ("ln_tuning_layers", "base_layer"))
    replaced = []
    for module in model.modules():
        children = dict(module.named_children())
        replaced += [children[of] for copies, of in pairs if {copies, of} <= children.keys()]
    return {id(param) for module in replaced for param in module.parameters()}


def is_adapter_layer(module: nn.Module) -> bool:
    """Return whether a module is one of PEFT's layers with adapters, by its class: it may be half made, or a wrapper."""
    return bool(getattr(type(module), "adapter_layer_names", ()))


def _find_blocks(model: Any, decoder: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the list of decoder blocks and its name, found by the classes of its entries, otherwise by its length."""
    name = type(model).__name__
    if not len(getattr(decoder, "layers", [None])):
        raise ModelNotSupportedError(f"{name} has no decoder blocks")
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    classes = set(getattr(model, "_no_split_modules", None) or ())
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    within = [(n, m) for n, m in lists if any(m is inner for inner in decoder.modules())] or lists
    named = [(n, m) for n, m in within if {type(b).__name__ for b in m} <= classes]
    as_deep = [(n, m) for n, m in within if len(m) == depth]
    inner = {id(part) for _, m in within for entry in m for part in entry.modules()}
    outermost = [(n, m) for n, m in within if id(m) not in inner]
    for candidates in ([each for each in named if each in as_deep], named, as_deep, outermost):
        if len(candidates) == 1:
            return candidates[0]
    raise ModelNotSupportedError(
        f"{name}: no list of {depth} decoder blocks was found, so there is nothing to stream by"
    )


def _reject_cross_layer_state(name: str, model: Any, prefix: str, blocks: nn.ModuleList) -> None:
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
    if getattr(model.config.get_text_config(), "is_decoder", True) or not _reads(blocks[0], "is_decoder"):
        return
    raise ModelNotSupportedError(
        f"{name} is an encoder (is_decoder is false in its config): each token sees the later ones that it would learn to predict. Load a "
        "decoder, or set is_decoder to true in the config to train this one as a decoder."
    )


def _reads(block: nn.Module, name: str) -> bool:
    """Return whether the code of a block or of a part of it uses an attribute of this name."""
    classes = {cls for module in block.modules() for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
    functions = [inspect.unwrap(each) for cls in classes for each in vars(cls).values() if inspect.isfunction(each)]
    return any(name in function.__code__.co_names for function in functions)


def adapted_model(model: Any) -> Any:
    """Return the model inside a PEFT model, if all parameters are in it; any other model as it is."""
    if not hasattr(model, "get_base_model"):
        return model
    inside = model.get_base_model()
    own = {id(param) for param in inside.parameters()}
    return inside if all(id(param) in own for param in model.parameters()) else model


def is_adapter_model(model: Any) -> bool:
    """Return whether a model is a PEFT model, or has adapters that transformers saves in PEFT's format."""
    return type(model).__module__.partition(".")[0] == "peft" or bool(getattr(model, "_hf_peft_config_loaded", False))


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module has parameters, and none in modules inside it."""
    own = list(module.parameters(recurse=False))
    return bool(own) and len(own) == len(list(module.parameters()))


def freeze(model: Any, trainable: str | None) -> None:
    """Freeze every weight whose name matches no pattern.

    Args:
        model: transformers model, possibly on the meta device.
        trainable: patterns separated by ``|``. A pattern matches whole parts of a name, and ``*`` matches anything:
            ``layers.20.*`` matches ``model.layers.20.mlp.up_proj.weight``, ``layers.2.*`` does not. None trains all weights.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    if trainable is None:
        return
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]  # a tied weight has several names
    chosen: set[int] = set()
    for pattern in (part.strip() for part in trainable.split("|") if part.strip()):
        fits = _compile(pattern)
        found = {id(param) for name, param in model.named_parameters(remove_duplicate=False) if fits.search(name)}
        if not found:
            parts = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
            close = difflib.get_close_matches(re.split(r"[.*]", pattern)[0] or pattern, parts, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else f"; names are like {names[0]}"
            raise ConfigError(f"trainable: {pattern!r} fits no weight of the model{hint}")
        chosen |= found
    for param in model.parameters():
        param.requires_grad_(id(param) in chosen)


def _compile(pattern: str) -> re.Pattern[str]:
    first, *middle = map(re.escape, pattern.split("*"))
    # The first place of each part is final, or a pattern with many stars would take for ever.
    inner = first + "".join(f"(?>.*?{part})" for part in middle[:-1]) + "".join(f".*{part}" for part in middle[-1:])
    return re.compile(rf"(?:^|\.){inner}(?:\.|$)")
