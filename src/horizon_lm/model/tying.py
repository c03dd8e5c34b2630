"""Keep a model's config true to the weights that are written with it."""

import copy
from contextlib import suppress
from typing import Any

from horizon_lm.model.quantization import take_quantization


def declare_untied(config: Any) -> None:
    """Set ``tie_word_embeddings: false`` in a config, and in its part for text."""
    for each in (config, config.get_text_config(decoder=True)):
        if getattr(each, "tie_word_embeddings", False):
            each.tie_word_embeddings = False


def true_config(model: Any) -> Any:
    """Return a copy of a model's config, for its decoded weights. If the model has two parameters where its config ties
    one, the copy declares nothing tied.
    """
    config = copy.deepcopy(model.config)
    take_quantization(config)
    for name, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        with suppress(AttributeError):  # the name of a module that PEFT has wrapped, so that it has another name now
            if model.get_parameter(name) is not model.get_parameter(source):
                declare_untied(config)
    return config
