"""The parts of a model: its units with their parameters, and what streaming must know of each."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from horizon_lm.common.units import EMBED, HEAD, OUTER, Unit, block
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.memory.layout.model import MatrixShape


@dataclass(slots=True)
class ParamRef:
    """A parameter with all of its places in the module tree: modules, each with its attribute."""

    name: str
    param: nn.Parameter
    places: list[tuple[nn.Module, str]]

    @property
    def matrix(self) -> MatrixShape | None:
        """The number, rows and columns of its matrices: one of a layer (M, N), or those of experts in one tensor (E, M, N). None for
        other weights.
        """
        module, name = self.places[0]
        shape = tuple(self.param.shape)
        if len(shape) == 3 and hasattr(module, "num_experts"):
            return shape
        is_layer = name == "weight" and not isinstance(module, nn.Embedding)
        return (1, *shape) if len(shape) == 2 and is_layer else None


@dataclass(slots=True)
class ModelParts:
    """The parts of a causal language model, or of a decoder with a `score` (sequence classification, reward models).

    Attributes:
        decoder: module that contains the list of blocks.
        blocks: the blocks, those of towers before those of the decoder.
        block_names: full name of each of them.
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
        towers: the indices of the blocks of each tower, which encodes images, video or audio.
        in_float32: full names of the weights that transformers keeps in float32 though it opens the model in bfloat16. They are
            stored, computed with and updated in float32.
    """

    _model: Any
    decoder: nn.Module
    blocks: Sequence[nn.Module]
    block_names: Sequence[str]
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
    towers: Sequence[range] = ()

    @property
    def model(self) -> Any:
        """The model, which must still be there if these parts refer to it weakly (`refer_weakly`)."""
        model = self._model() if isinstance(self._model, weakref.ref) else self._model
        assert model is not None, "the model of these parts is gone"
        return model

    def trunks(self) -> list[nn.Module]:
        """Return the modules around the blocks, outermost first; the model calls one of them for hidden states."""
        names = self.block_names[-1].split(".")[:-2]  # without the list of blocks, and the place in it
        return [self.model.get_submodule(".".join(names[:depth])) for depth in range(1, len(names) + 1)]

    def refer_weakly(self) -> None:
        """Refer to the model weakly, because the model now owns these parts."""
        self._model = weakref.ref(self.model)

    def refs(self) -> list[ParamRef]:
        """Return all parameters, unit by unit."""
        return [ref for refs in self.units.values() for ref in refs]

    def old_names(self, before: "ModelParts") -> dict[str, str]:
        """Return the names that the parameters had before PEFT wrapped them, by their present names; PEFT's own parameters had none.

        Args:
            before: the parts of the model before.
        """
        # By identity, because PEFT renames what it wraps.
        names = {id(ref.param): ref.name for ref in before.refs()}
        return {ref.name: names[id(ref.param)] for ref in self.refs() if id(ref.param) in names}

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def decoder_blocks(self) -> range:
        """The indices of the decoder's blocks, which a pass computes for any batch."""
        return range(self.towers[-1].stop if self.towers else 0, self.num_blocks)

    @property
    def vocabulary(self) -> int:
        """The number of rows of the embedding, V."""
        return int(self.units[EMBED][0].param.shape[0])

    @property
    def hidden(self) -> int:
        """The number of columns of the embedding, H."""
        return int(self.units[EMBED][0].param.shape[1])

    @property
    def head_refs(self) -> Sequence[ParamRef]:
        """The parameters of the head, for a tied one those of the embedding."""
        return self.units[EMBED] if self.tied else self.units[HEAD]

    @property
    def head_width(self) -> int:
        """Width of the head's input, which differs from H if a projection follows the blocks."""
        return int(self.head_refs[0].param.shape[1])

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the head: V, or the number of labels of a classifier."""
        return int(self.units[HEAD][0].param.shape[0]) if self.classifies else self.vocabulary

    def computed_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a weight takes part in computations, in a model that computes in ``dtype``."""
        return torch.float32 if name in self.in_float32 else dtype

    def head_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the head on the device, in a model that computes in ``dtype``."""
        return torch.float32 if any(ref.name in self.in_float32 for ref in self.units[HEAD]) else dtype

    def quantize(self, codecs: Mapping[str, Codec]) -> None:
        """Note the codecs of the weights that are quantized, by full name. As in transformers, these are no longer kept in float32."""
        self.codecs = codecs
        self.in_float32 = self.in_float32.difference(codecs)

    def renamed_in_float32(self, old_names: Mapping[str, str]) -> frozenset[str]:
        """Return the weights that are computed with in float32, by their names in a model that PEFT has changed.

        Args:
            old_names: the names in this model, by the new name.
        """
        return frozenset(name for name, old in old_names.items() if old in self.in_float32)

    def in_float32_inside(self, path: str) -> frozenset[str]:
        """Return the weights of a module that are computed with in float32, by their names inside the module."""
        return frozenset(name.removeprefix(f"{path}.") for name in self.in_float32 if name.startswith(f"{path}."))

    def shapes(self) -> dict[Unit, dict[str, torch.Size]]:
        """Return the shapes of all parameters, by unit and full name."""
        return {unit: {ref.name: ref.param.shape for ref in refs} for unit, refs in self.units.items()}

    @property
    def adapter_names(self) -> frozenset[str]:
        """Full names of the adapters' parameters inside all blocks."""
        return frozenset(name for names in self.adapters.values() for name in names)

    def trains(self, index: int) -> bool:
        """Return whether weights or adapters of a block are trained."""
        adapters = self.adapters.get(index)
        of_adapters = [ref for ref in self.units[OUTER] if ref.name in adapters] if adapters else []
        return any(ref.param.requires_grad for ref in (*self.units[block(index)], *of_adapters))

    def first_differentiated(self) -> int:
        """Return the first block through which gradients flow for rows of text, or the number of blocks if they flow through none.

        Outer parameters count as used before the decoder's blocks, except for the final norm and adapters inside blocks.
        """
        after_blocks = {id(param) for param in self.final_norm.parameters()} if self.final_norm else set()
        block_of = {name: u for u, names in self.adapters.items() for name in names}
        outer = [ref for ref in (*self.units[EMBED], *self.units[OUTER]) if ref.param.requires_grad]
        if any(id(ref.param) not in after_blocks and ref.name not in block_of for ref in outer):
            return self.decoder_blocks.start
        return next(filter(self.trains, self.decoder_blocks), self.num_blocks)

    def frozen_base(self) -> frozenset[Unit]:
        """Return the units without trainable weights, if adapters are trained and no weight of a decoder block is; empty otherwise."""
        blocks, untrained = set(map(block, self.decoder_blocks)), self.untrained()
        return untrained if self.is_adapted and blocks <= untrained else frozenset()

    def untrained(self) -> frozenset[Unit]:
        """Return the units without trainable weights."""
        return frozenset(unit for unit, refs in self.units.items() if not any(ref.param.requires_grad for ref in refs))

    def hidden_matrices(self) -> dict[str, MatrixShape]:
        """Return the number, rows and columns of the trainable matrices of decoder blocks, by full name.

        Weights that are kept in float32 are not among them: they are gates and decays, to whose single elements a model is sensitive.
        """
        refs = [ref for u in self.decoder_blocks for ref in self.units[block(u)] if ref.name not in self.in_float32]
        return {ref.name: ref.matrix for ref in refs if ref.matrix is not None and ref.param.requires_grad}
