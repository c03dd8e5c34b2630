"""The outputs of a model whose loss, or log-probabilities, were computed in chunks, without logits."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horizon_lm.constants import IGNORE_INDEX
from horizon_lm.engine.calls.chunked_losses import WITHOUT_GRADIENT, TokenLogprobs
from horizon_lm.engine.units.loss_inputs import LossInputs
from horizon_lm.errors import MissingLogitsError


def as_token_logprobs(
    names: Sequence[str], values: Sequence[torch.Tensor], shape: torch.Size, aux_losses: Mapping[str, torch.Tensor]
) -> TokenLogprobs:
    """Return named values (B * T,) as fields in the shape (B, T) of the labels, with the auxiliary losses."""
    found = {name: value.view(shape) for name, value in zip(names, values, strict=True)}
    # All values come from one autograd node, which marks every floating-point output as differentiable.
    for name in found.keys() & set(WITHOUT_GRADIENT):
        found[name] = found[name].detach()
    return TokenLogprobs(**found, **aux_losses)


def aux_losses(model: Any, output: Any) -> dict[str, torch.Tensor]:
    """Return the auxiliary loss that a model adds to its loss, weighted and unweighted, from an output computed
    without labels; empty without such a loss.
    """
    aux = getattr(output, "aux_loss", None)
    if aux is None:
        return {}
    return {"aux_loss": aux * model.router_aux_loss_coef, "unweighted_aux_loss": aux}


class MissingLogits:
    """A placeholder for logits that were computed only in chunks; using it raises MissingLogitsError."""

    # With None in its place, code that uses logits would fail without a word about head='chunked'.
    def __getattr__(self, name: str) -> Any:
        raise MissingLogitsError

    def __getitem__(self, index: Any) -> Any:
        raise MissingLogitsError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise MissingLogitsError

    def __repr__(self) -> str:
        return "no logits with head='chunked'"


def without_labels(inputs: LossInputs) -> dict[str, Any]:
    """Return arguments of a call whose loss the chunks compute.

    With one ignored token instead of all labels, the model's own loss has no cross-entropy: it is the auxiliary loss of
    experts, or zero.
    """
    # One token is enough, as `ChunkedLmHead.head_forward` gives logits (1, 1, V) for the whole batch.
    ignored = inputs.labels.new_full((1, 1), IGNORE_INDEX)
    return {"labels": ignored, "shift_labels": ignored, "num_items_in_batch": inputs.num_items}


def with_loss(output: Any, loss: torch.Tensor) -> Any:
    """Return a model's output with the loss of the chunks added to its own, and without logits."""
    # A model output leaves out None, so this copies what the model gave, router logits for example, and no more.
    fields = {k: v for k, v in output.items() if k not in ("loss", "logits")}
    return type(output)(loss=loss + output.loss, logits=MissingLogits(), **fields)
