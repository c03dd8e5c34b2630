"""Final norm and LM head over chunks of tokens (``head="chunked"``), which avoids computing all logits of a batch.

The model's forward method runs once for the whole batch without the head, and then once per chunk with a trunk that
returns the hidden states of that chunk. This way, Hugging Face's own code scales and caps the logits and computes the
loss.

A pass with several batches runs the model once for each, and then the chunks of all of them, one batch after the other.

Shapes: B batch rows, T tokens of a row, N tokens of a chunk, H hidden size, V vocabulary. Logits of a chunk are (1, N, V); all
of them would be (B, T, V), often the largest tensor of a step. Only trained tokens, whose label is not ignored, are in chunks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from horizon_lm.engine.passes.lockstep import caller_id
from horizon_lm.engine.units.grad_sink import GradSlot
from horizon_lm.engine.units.lm_head import LmHead, Outer
from horizon_lm.errors import StreamingError
from horizon_lm.model.chunk_linear import ChunkLinear
from horizon_lm.model.functional import in_place
from horizon_lm.model.head_path import ChunkedPath
from horizon_lm.model.outer_trial import is_same
from horizon_lm.model.trial import Decoded, hidden_of

T = TypeVar("T")


class ChunkedLmHead:
    """The final norm, head and loss of a model, computed over chunks of its trained tokens.

    Args:
        head: the streamed head.
        path: the way from hidden states to the loss in this model.
        call_model: the model's own forward.
    """

    def __init__(self, head: LmHead, path: ChunkedPath, call_model: Callable[..., Any]) -> None:
        self.head, self.engine, self.path, self.call_model = head, head.engine, path, call_model
        self._runs_trunk = False  # the forward pass over the whole batch is running, without the head
        self._skips_norm = False  # the final norm is also skipped and left to the chunks
        self._norm_input: dict[int, torch.Tensor] = {}  # by `caller_id`, (B, T, H)
        self._hidden: dict[int, torch.Tensor] = {}  # output of the trunk, (B, T, H)
        self._chunk: Chunk | None = None  # the chunk that the model is computing
        self._vocabulary = self.engine.parts.vocabulary
        # By the full name of a parameter, the attribute of the module that holds it.
        self._head_attributes = self._attributes_of(head.module)
        self.norm_attributes = self._attributes_of(self.engine.parts.final_norm)

    @property
    def chunk_tokens(self) -> int:
        """The tokens of a chunk, which `reconfigure` may change."""
        return self.engine.options.head_chunk_tokens

    def _attributes_of(self, owner: Any) -> dict[str, str]:
        """Return the attribute of a module that holds each of its parameters, by the parameter's full name."""
        refs = self.engine.refs.items()
        return {name: attribute for name, ref in refs for module, attribute in ref.places if module is owner}

    @property
    def replaces_head(self) -> bool:
        """True while this object replaces the head's module."""
        return self._runs_trunk or self._chunk is not None

    @contextmanager
    def without_head(self, with_norm: bool) -> Iterator[None]:
        """Context manager: run the model over the whole batch without its head and final norm.

        Args:
            with_norm: compute the final norm nevertheless, because the caller or a hook uses its output.
        """
        self._runs_trunk, self._skips_norm = True, self.path.norm_is_last and not with_norm
        try:
            yield
        finally:
            self._runs_trunk = False
            # After an error, hidden states would stay alive here. `_skips_norm` stays as it is, for the chunks (`outer_names`).
            self._norm_input, self._hidden = {}, {}

    def take_hidden(self) -> torch.Tensor:
        """Return the hidden states (B, T, H) of the batch that this thread has run through the trunk, and forget them."""
        self._norm_input.pop(caller_id(), None)
        return self._hidden.pop(caller_id())

    def outer_names(self) -> list[str]:
        """Return the full names of the outer parameters that chunks use: the weights of the norm, and the bias of a tied head."""
        norm = list(self.norm_attributes) if self._skips_norm else []
        return [*norm, *self.head.outer_places]

    # Replacements of modules' forwards

    def trunk_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the trunk over the whole batch, or return the hidden states of the current chunk."""
        if self._chunk is not None:
            # The model goes on as after its trunk, for example to scale the logits. The norm that the trunk has skipped is
            # computed here.
            return Decoded(self._chunk.normalise())
        output = forward(*args, **kwargs)
        if self._runs_trunk:
            hidden, norm_input = hidden_of(output), self._norm_input.get(caller_id())
            self._hidden[caller_id()] = hidden
            # A skipped norm must be the trunk's last operation, or chunks would apply it in the wrong place.
            if self._skips_norm and (norm_input is None or not is_same(hidden, norm_input)):
                raise StreamingError(
                    f"{type(self.path.trunk).__name__} does more after its final norm than when the model was streamed; stream "
                    "with head='whole'"
                )
        return output

    def norm_forward(self, forward: Callable[..., Any], hidden: torch.Tensor) -> Any:
        """Run the final norm, or skip it if each chunk computes it (`Chunk.normalise`), so that its float32 copy of (B, T, H) is
        never made.
        """
        if not (self._runs_trunk and self._skips_norm):
            return forward(hidden)
        # By batch, so that `trunk_forward` can check that nothing follows the norm.
        self._norm_input[caller_id()] = hidden
        return hidden

    def head_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the current chunk (1, N, V), or zeros (1, 1, V) in the forward pass over the whole
        batch.

        The zeros represent one ignored token, for which the model computes only the auxiliary part of its loss.
        """
        if self._chunk is not None:
            return self._chunk.project(hidden)
        return hidden.new_zeros((1, 1, self._vocabulary))

    def by_attribute(self, values: Mapping[str, T]) -> dict[str, T]:
        """Return values of the head's parameters by the attributes of its Linear, ``weight`` and ``bias``, instead of their full names."""
        return {self._head_attributes[name]: value for name, value in values.items()}

    @contextmanager
    def computing(self, chunk: "Chunk") -> Iterator[None]:
        """Context manager: run the model's forward method for this chunk."""
        self._chunk = chunk
        try:
            yield
        finally:
            self._chunk = None


class Chunk:
    """A chunk of trained tokens while it passes through norm and head.

    Args:
        owner: the chunked head.
        hidden: hidden states, shape (1, N, H): the model sees the chunk as a batch of one row.
        outer: the outer parameters of `ChunkedLmHead.outer_names`, by full name.
        slot: the slot of the gradients of the head's weights; None if they have none, or if there is no backward pass.
    """

    def __init__(self, owner: ChunkedLmHead, hidden: torch.Tensor, outer: Outer, slot: GradSlot | None) -> None:
        self.owner, self.hidden, self.outer, self.slot = owner, hidden, outer, slot

    def normalise(self) -> torch.Tensor:
        """Return the normed hidden states (1, N, H). They are returned as they are if the norm is not left to the chunks."""
        norm, attributes = self.owner.engine.parts.final_norm, self.owner.norm_attributes
        # Every final norm has weights; they are among the outer parameters only if the norm is left to the chunks.
        weights = {attributes[name]: tensor for name, tensor in self.outer.items() if name in attributes}
        if norm is None or not weights:
            return self.hidden
        # The forward of the class, because that of the instance is `norm_forward`.
        with in_place((norm, attribute, weight) for attribute, weight in weights.items()):
            hidden: torch.Tensor = type(norm).forward(norm, self.hidden)  # type: ignore[attr-defined]
        return hidden

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (1, N, V) of hidden states (1, N, H)."""
        head, slot = self.owner.head, self.slot
        # The bias of a tied head is an outer parameter.
        weights = self.owner.by_attribute(head.weights() | {name: self.outer[name] for name in head.outer_places})
        targets = {} if slot is None else {name: partial(slot.write, name) for name in slot.trained}
        # Without compiled code, gradients have the bits of plain autograd.
        unrounded = head.engine.options.compile
        return ChunkLinear.apply(
            hidden, weights["weight"], weights.get("bias"), self.owner.by_attribute(targets), unrounded
        )
