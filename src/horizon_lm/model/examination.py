"""Examine whether a model can be streamed exactly, and what decides how it is computed.

The planner examines a skeleton, and streaming examines the model that it will train, by the same rules.
"""

from dataclasses import dataclass

from horizon_lm.common.streaming_options import WHOLE_BATCHES
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model import attention
from horizon_lm.model.adapter_kinds import adapted_model
from horizon_lm.model.image_inputs import takes_images
from horizon_lm.model.outer_trial import OuterTrial, require_each_block_once, try_outer
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.proven import (
    IMAGES,
    IMAGES_IN_MICRO_BATCHES,
    MICRO_BATCHES,
    VARLEN,
    find_proof,
    require_proven,
)


@dataclass(frozen=True, slots=True)
class Examined:
    """A model that can be streamed.

    Attributes:
        parts: its units.
        trial: the behavior of its outer code; None if that cannot be run on text alone.
        attention: the attention implementation that was set.
        unproven: the reason why the model is not proven as it will be computed; empty if it is.
        images: it accepts images, video and audio: ``images``, and in batches that are cut, ``images_in_micro_batches``.
        whole_batch_only: its batches must not be cut into micro-batches.
    """

    parts: ModelParts
    trial: OuterTrial | None
    attention: str
    unproven: str
    images: frozenset[str]
    whole_batch_only: bool


def examine(
    parts: ModelParts, *, attn_implementation: str | None, on_accelerator: bool, in_micro_batches: bool = False,
    allow_unproven_model: bool = False,
) -> Examined:  # fmt: skip
    """Examine a model, and set its attention implementation.

    Args:
        parts: the model's units, from `model.units.find_parts`.
        attn_implementation: as in `horizon_lm.stream`.
        on_accelerator: choose attention as for a GPU.
        in_micro_batches: batches are cut into micro-batches.
        allow_unproven_model: as in `horizon_lm.stream`.

    Raises:
        ModelNotSupportedError: the model cannot be streamed exactly, or is not proven and must be.
    """
    trial = try_outer(parts)
    require_each_block_once(parts, trial)
    if in_micro_batches and trial is not None and not trial.rows_first:
        raise ModelNotSupportedError(
            f"{type(parts.model).__name__}: rows are not the first dimension of its hidden states, so they cannot be cut into "
            f"micro-batches; {WHOLE_BATCHES}"
        )
    attention.register()
    proof = find_proof(parts)
    # A classifier may take the score of a masked token, if padding is not its padding token; varlen computes nothing for it.
    # The tokens of an image attend in both directions in some decoders, which varlen cannot do.
    is_for_text = not (parts.classifies or parts.towers or takes_images(adapted_model(parts.model)))
    prefers_varlen = on_accelerator and VARLEN in proof.features and is_for_text
    chosen = attention.choose(parts.model, attn_implementation, prefers_varlen)
    needed = {MICRO_BATCHES: in_micro_batches, VARLEN: chosen == attention.NAME}
    unproven = proof.reason_against(*(feature for feature, is_needed in needed.items() if is_needed))
    if not allow_unproven_model:
        require_proven(unproven)
    of_images = frozenset({IMAGES, IMAGES_IN_MICRO_BATCHES})
    return Examined(
        parts=parts, trial=trial, attention=chosen, unproven=unproven,
        images=of_images if allow_unproven_model else of_images & proof.features,
        whole_batch_only=MICRO_BATCHES not in proof.features and not allow_unproven_model,
    )  # fmt: skip
