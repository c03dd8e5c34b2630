"""Tokenizers that say which characters their tokens come from: of that, masks are made."""

import copy
import json
from typing import Any

from horizon_lm.errors import ConfigError


def with_offsets(tokenizer: Any) -> Any:
    """A tokenizer of whose tokens every one has all its characters: a copy where it would leave spaces out of them.

    Raises:
        ConfigError: the tokenizer does not tell characters.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the tokenizer does not tell the characters its tokens come from; add its "
            "tokenizer.json to the folder"
        )
    processor = tokenizer.backend_tokenizer.post_processor
    if processor is None or not _untrim(state := json.loads(processor.__getstate__())):
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    processor = tokenizer.backend_tokenizer.post_processor
    processor.__setstate__(json.dumps(state).encode())
    tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


def _untrim(state: Any) -> bool:
    """Clear ``trim_offsets`` wherever a post-processor has it; whether it was set. Tokens do not depend on it."""
    parts = list(state.values()) if isinstance(state, dict) else state if isinstance(state, list) else []
    found = bool(sum(map(_untrim, parts)))  # all of them, not up to the first
    if isinstance(state, dict) and state.get("trim_offsets"):
        state["trim_offsets"], found = False, True
    return found
