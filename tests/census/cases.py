"""The cases of the census, and the function that runs them."""

from collections.abc import Callable

from tests.census import image_cases as images
from tests.census import text_cases as text
from tests.census import variants
from tests.census.comparison import Outcome
from tests.census.opening import OPENED
from tests.census.subject import Subject, attempt

_TEXT = (
    text.whole, text.default, text.micro_batches, text.default_micro_batches, text.accumulation, text.evaluation,
    text.hidden_states, text.generate, text.adamw, text.update_in_backward, text.save, text.varlen,
    text.default_precision, variants.other_tie, variants.auxiliary_loss, variants.shared_state,
)  # fmt: skip
_IMAGES = (
    images.images, images.default_images, images.several_images, images.mixed_images, images.frozen_tower,
    images.tower_alone, images.images_in_micro_batches, images.image_accumulation, images.image_evaluation,
    images.image_adamw, images.image_save,
)  # fmt: skip
CASES: dict[str, Callable[[Subject], Outcome]] = {case.__name__: case for case in _TEXT + _IMAGES}
FOR_IMAGES = tuple(case.__name__ for case in _IMAGES)
FOR_LANGUAGE_MODELS = ("generate", "other_tie", "auxiliary_loss")  # a classifier has one head, and one loss
FOR_REFUSALS = ("whole", "default")  # mappings whose models are not intended for training


def cases_of(mapping: str) -> list[str]:
    """Return the names of the cases for a mapping."""
    if mapping == "classification":
        return [name for name in CASES if name not in FOR_IMAGES + FOR_LANGUAGE_MODELS]
    if mapping not in ("causal", "image_text"):
        return list(FOR_REFUSALS)
    return [name for name in CASES if mapping == "image_text" or name not in FOR_IMAGES]


def run_case(subject: Subject, name: str) -> Outcome:
    """Run a case and return its outcome, including any exception."""
    return attempt((CASES | OPENED)[name], subject)
