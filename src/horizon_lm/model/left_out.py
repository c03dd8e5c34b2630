"""Names by which checkpoints and models may differ, as transformers knows."""

import re
from typing import Any

_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")  # kept once, and computed now


def is_left_out(model: Any, name: str) -> bool:
    """Return whether transformers leaves out a tensor of this name without a warning."""
    patterns = (*_BUFFERS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))
    return any(re.search(pattern, name) for pattern in patterns)


def may_be_missing(model: Any, name: str) -> bool:
    """Return whether transformers does without a tensor of this name without a warning."""
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)
