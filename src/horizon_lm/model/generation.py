"""Answer prompts with those settings of a model's folder that make sense here.

A ``generation_config.json`` may ask for beams, which cannot be printed token by token, for assistants, for code of the hub, or for nonsense.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from horizon_lm.errors import ConfigError

_NUMBERS = {
    "repetition_penalty": 1e3,
    "no_repeat_ngram_size": 1e6,
}  # of the folder, with the largest value that is used
_OF_SAMPLING = {"top_k": 1e9, "top_p": 1.0, "min_p": 1.0}


@contextmanager
def generation_settings(
    model: Any, max_new_tokens: int, pad_token_id: int | None, temperature: float = 0.0
) -> Iterator[None]:
    """Context manager: let ``model.generate`` use these settings, and the folder's end tokens, penalties and limits of sampling.

    Args:
        model: the model.
        max_new_tokens: the largest number of new tokens.
        pad_token_id: the token that fills rows.
        temperature: temperature of sampling; 0 decodes greedily.

    Raises:
        ConfigError: a setting of the folder that would be used is invalid.
    """
    from transformers import GenerationConfig

    before, num_tokens = model.generation_config, model.config.get_text_config().vocab_size
    chosen: dict[str, Any] = {"do_sample": temperature > 0, **({"temperature": temperature} if temperature else {})}
    for name in ("bos_token_id", "eos_token_id"):
        value = getattr(before, name, None)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(each) is int and 0 <= each < num_tokens for each in ids):
            raise _invalid(name, value, f"a token from 0 to {num_tokens - 1}, or a list of such tokens")
        chosen[name] = value
    for name, most in (_NUMBERS | (_OF_SAMPLING if temperature else {})).items():
        value = getattr(before, name, None)
        if value is not None and not (type(value) in (int, float) and 0 <= value <= most):
            raise _invalid(name, value, f"a number from 0 to {most:g}")
        chosen[name] = value or None  # 0 is off
    model.generation_config = GenerationConfig(max_new_tokens=max_new_tokens, pad_token_id=pad_token_id, **chosen)
    try:
        yield
    finally:
        model.generation_config = before


def _invalid(name: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"generation_config.json: {name}: {str(value)[:80]!r} is not {wanted}; correct or remove it")
