"""Answer TRL's fused LM head from a streamed model.

TRL's trainers patch ``model.forward``: with ``fused_lm_head=True`` it calls the backbone alone, and projects its output with the
head's weight. A streamed model has neither on the device then. It computes the same values in its own pass, from the
logits of chunks of tokens.
"""

import inspect
from collections.abc import Callable, Collection
from types import MethodType
from typing import Any

import torch

from horizon_lm.common.constants import IGNORE_INDEX
from horizon_lm.engine.calls.token_logprobs import token_logprobs
from horizon_lm.engine.streamed import is_streamed
from horizon_lm.integrations.evaluated_models import stream_beside

ADD_HEAD = "add_fused_lm_head"  # by which TRL's trainers patch a model
_STATISTICS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def unless_streamed(model: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a function that replaces TRL's function for patching a model: the replacement patches streamed models by `add_head`.

    Args:
        model: the trainer's streamed model. If it has adapters, TRL patches the model inside it, which is the streamed one
            unless PEFT's prompts are streamed with it.
    """
    inside = model.get_base_model() if hasattr(model, "get_base_model") else model

    def replace_patch(original: Callable[..., None]) -> Callable[..., None]:
        def add_fused_lm_head(patched: Any, *args: Any, **kwargs: Any) -> None:
            """Patch the trained model, or a reference, which is streamed first if it can be.

            TRL passes the model inside PEFT's layers; if only the PEFT model around it is streamed, as with prompts, that one is patched.
            """
            if patched is inside and not is_streamed(patched):
                patched = model
            stream_beside(patched, model)
            patch = add_head if is_streamed(patched) else original
            patch(patched, *args, **kwargs)

        return add_fused_lm_head

    return replace_patch


def add_head(
    model: Any, temperature: float = 1.0, cast_lm_head_to_fp32: bool = False, outputs: Collection[str] = ("log_probs",)
) -> None:
    """Let ``model(..., labels=labels, fused_lm_head=True)`` return TRL's ``FusedCausalLMOutput``.

    Args:
        model: a streamed model.
        temperature: divides the logits.
        cast_lm_head_to_fp32: compute the log-probabilities in float32, which is always done.
        outputs: fields of the output to compute, besides ``log_probs``.
    """
    original = model.forward
    statistics = [name for name in _STATISTICS if name in outputs]

    def forward(
        self: Any, *args: Any, fused_lm_head: bool = False, labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None, num_items_in_batch: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Compute as before, or with ``fused_lm_head=True`` what TRL's fused head returns."""
        targets = {"labels": labels, "shift_labels": shift_labels}
        given = {name: value for name, value in targets.items() if value is not None}
        if fused_lm_head:
            return _fused_output(self, args, kwargs, given, num_items_in_batch, temperature, statistics)
        if num_items_in_batch is not None:
            given["num_items_in_batch"] = num_items_in_batch
        return original(*args, **given, **kwargs)

    forward.__signature__ = inspect.signature(type(model).forward)  # type: ignore[attr-defined]  # which `generate` inspects
    model.forward = MethodType(forward, model)


def _fused_output(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], labels: dict[str, torch.Tensor], num_items: Any,
    temperature: float, statistics: Collection[str],
) -> Any:  # fmt: skip
    """Return what TRL's fused head returns: the loss, and the log-probabilities of the next tokens with their mask.

    ``labels`` has ``shift_labels``, or ``labels`` alone. ``num_items``: the number that the sum of losses is divided by; None for the
    number of targets in this batch.
    """
    from trl.trainer.utils import FusedCausalLMOutput

    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    if args:
        kwargs["input_ids"] = args[0]
    values = token_logprobs(model, temperature=temperature, statistics=statistics, **kwargs, **labels)
    are_shifted = "shift_labels" in labels
    targets = labels["shift_labels"] if are_shifted else labels["labels"]
    num_prompt = values.logprobs.shape[1] - targets.shape[1]  # positions of a prompt of PEFT before each row
    targets = torch.nn.functional.pad(targets, (num_prompt, 0), value=IGNORE_INDEX)
    if not are_shifted:
        targets = targets[:, 1:]
    # As in TRL, the last position of a row is left out unless the labels are shifted: it has no target.
    predicting = slice(None) if are_shifted else slice(None, -1)
    log_probs = values.logprobs[:, predicting]
    mask = targets != IGNORE_INDEX
    fields = {name: getattr(values, name)[:, predicting] for name in statistics}
    if "is_top1" in fields:
        fields["is_top1"] = fields["is_top1"].bool()
    # Log-probabilities are 0 where the label is ignored.
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if num_items is None else num_items)
    aux_loss = values.unweighted_aux_loss
    if aux_loss is not None:  # TRL changes the coefficient in the config, which the model has read before
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
    return FusedCausalLMOutput(
        loss=loss, log_probs=log_probs, label_mask=mask.to(log_probs.device), aux_loss=aux_loss, **fields
    )
