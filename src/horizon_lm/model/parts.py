"""Finding the units of a Hugging Face causal language model."""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.plan.capacity import ModelSizes
from horizon_lm.schedule.ops import EMBED, HEAD, OUTER, block

_FINAL_NORM_NAMES = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "final_norm", "norm_f", "ln_out")
# Arguments through which blocks share state that a replay would not see.
_CROSS_LAYER_ARGUMENTS = ("shared_kv_states", "per_layer_input", "per_layer_inputs")


@dataclass(slots=True)
class ParamRef:
    """A parameter with every place in the module tree that refers to it."""

    name: str
    param: nn.Parameter
    places: list[tuple[nn.Module, str]]


@dataclass(slots=True)
class ModelParts:
    """A causal language model taken apart.

    Attributes:
        units: parameters by unit, in the order of the model; a tied table belongs to ``embed`` only.
        final_norm: the norm between the last block and the head, if it is where it usually is.
        tied: the head multiplies by the embedding table.
    """

    model: Any
    decoder: nn.Module
    blocks: nn.ModuleList
    block_prefix: str
    embed: nn.Module
    head: nn.Module
    final_norm: nn.Module | None
    units: dict[str, list[ParamRef]]
    tied: bool

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def head_width(self) -> int:
        """Columns of the head: of hidden states, which a projection may have brought to another width."""
        refs = self.units[EMBED] if self.tied else self.units[HEAD]
        return int(refs[0].param.shape[1])

    def first_differentiated(self) -> int:
        """The first block that a gradient passes through; as many as there are blocks, if none does."""
        norm = {id(p) for p in self.final_norm.parameters()} if self.final_norm else set()
        before_blocks = (ref for unit in (EMBED, OUTER) for ref in self.units[unit] if id(ref.param) not in norm)
        if any(ref.param.requires_grad for ref in before_blocks):
            return 0
        trained = (u for u in range(self.num_blocks) if any(ref.param.requires_grad for ref in self.units[block(u)]))
        return next(trained, self.num_blocks)

    def sizes(self, trained_only: bool = False) -> ModelSizes:
        """Elements of the model's parameters, or only of those that are trained, for the plan."""
        numel = {
            unit: [ref.param.numel() for ref in refs if ref.param.requires_grad or not trained_only]
            for unit, refs in self.units.items()
        }
        vocabulary, hidden = self.units[EMBED][0].param.shape
        return ModelSizes(
            blocks=[numel[block(u)] for u in range(self.num_blocks)],
            table=numel[EMBED],
            own_head=[] if self.tied else numel[HEAD],
            outer=numel[OUTER],
            vocabulary=vocabulary,
            hidden=hidden,
            tied=self.tied,
        )


def find_parts(model: Any) -> ModelParts:
    """Take a model apart.

    Raises:
        ModelNotSupportedError: not a causal LM with a list of decoder blocks, or one that cannot be streamed exactly.
    """
    name = type(model).__name__
    if not callable(getattr(model, "get_output_embeddings", None)) or model.get_output_embeddings() is None:
        raise ModelNotSupportedError(
            f"{name} is not a causal language model: it has no output embeddings. Load it with AutoModelForCausalLM."
        )
    decoder = model.get_decoder()
    prefix, blocks = _find_blocks(model, decoder)
    _refuse_cross_layer_state(name, model, prefix, blocks)
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    final_norm = next(
        (m for n, m in decoder.named_children() if n in _FINAL_NORM_NAMES and _count_params(m) > 0), None
    )  # fmt: skip

    owner: dict[int, str] = {id(module): block(i) for i, b in enumerate(blocks) for module in b.modules()}
    owner |= {id(module): HEAD for module in head.modules()} | {id(module): EMBED for module in embed.modules()}
    refs: dict[int, ParamRef] = {}
    units: dict[str, list[ParamRef]] = {u: [] for u in (EMBED, *(block(i) for i in range(len(blocks))), HEAD, OUTER)}
    for module_name, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is None:
                continue
            unit = owner.get(id(module), OUTER)
            if type(param) is not nn.Parameter or not param.is_floating_point():
                raise ModelNotSupportedError(
                    f"{name}: {module_name}.{attribute} is a {type(param).__name__} of {param.dtype}; quantized weights "
                    "are not streamed. Load the model in bf16 or float32."
                )
            if id(param) in refs:
                _refuse_tie(name, refs[id(param)].name, f"{module_name}.{attribute}", unit)
                refs[id(param)].places.append((module, attribute))
            else:
                refs[id(param)] = ref = ParamRef(f"{module_name}.{attribute}", param, [(module, attribute)])
                units[unit].append(ref)
    table = next((ref for ref in units[EMBED] if ref.places[0] == (embed, "weight")), None)
    if table is None or len(units[EMBED]) != 1:
        raise ModelNotSupportedError(f"{name}: the input embedding is not one table of rows, which streaming needs")
    tied = any(module is head for module, _ in table.places)
    return ModelParts(model, decoder, blocks, prefix, embed, head, final_norm, units, tied)


def _find_blocks(model: Any, decoder: nn.Module) -> tuple[str, nn.ModuleList]:
    if not len(getattr(decoder, "layers", [None])):
        raise ModelNotSupportedError(f"{type(model).__name__} has no decoder blocks")
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    classes = set(getattr(model, "_no_split_modules", None) or ())
    lists = [
        (n, m) for n, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and len(m) == depth and any(m is inner for inner in decoder.modules())
    ]  # fmt: skip
    named = [(n, m) for n, m in lists if {type(b).__name__ for b in m} <= classes]
    for candidates in (named, lists):
        if len(candidates) == 1:
            return candidates[0]
    raise ModelNotSupportedError(
        f"{type(model).__name__}: no list of {depth} decoder blocks was found, so there is nothing to stream by"
    )


def _refuse_cross_layer_state(name: str, model: Any, prefix: str, blocks: nn.ModuleList) -> None:
    config = model.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ModelNotSupportedError(f"{name} has an encoder or cross-attention; only decoders are streamed")
    if getattr(config, "num_kv_shared_layers", 0):
        raise ModelNotSupportedError(
            f"{name} shares keys and values between layers (num_kv_shared_layers="
            f"{config.num_kv_shared_layers}); streaming it block by block would give wrong gradients"
        )
    for module in {type(b): b for b in blocks}.values():
        shared = [a for a in inspect.signature(module.forward).parameters if a in _CROSS_LAYER_ARGUMENTS]
        if shared:
            raise ModelNotSupportedError(
                f"{name}: blocks of {prefix} exchange state through {', '.join(shared)}; streaming them one by one "
                "would give wrong gradients"
            )


def _refuse_tie(name: str, first: str, second: str, unit: str) -> None:
    if unit != HEAD:
        raise ModelNotSupportedError(
            f"{name}: {first} and {second} are one parameter; only the head may be tied, and only to the embedding"
        )


def _count_params(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
