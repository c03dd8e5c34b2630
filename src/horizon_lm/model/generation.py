"""Answer prompts with those settings of a model's folder that make sense here, and find the sequences of a call of ``generate``.

A ``generation_config.json`` may ask for beams, which cannot be printed token by token, for assistants, for code of the hub, or for nonsense.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from horizon_lm.errors import ConfigError, first_line

GENERATION_CONFIG = "generation_config.json"
_NUMBERS = {
    "repetition_penalty": 1e3,
    "no_repeat_ngram_size": 1e6,
}  # of the folder, with the largest value that is used
_OF_SAMPLING = {"top_k": 1e9, "top_p": 1.0, "min_p": 1.0}
# Arguments of models: the name since transformers 5.24, the one before, and those of Mamba and RWKV.
CACHES = ("cache", "past_key_values", "cache_params", "state")


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

    before = model.generation_config
    chosen = _tokens_of_folder(before, model.config.get_text_config().vocab_size)
    chosen |= _numbers_of_folder(before, _NUMBERS)
    if temperature:
        chosen |= {"temperature": temperature, **_numbers_of_folder(before, _OF_SAMPLING)}
    model.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens, pad_token_id=pad_token_id, do_sample=temperature > 0, **chosen
    )
    try:
        yield
    finally:
        model.generation_config = before


def read_generation_config(folder: Path) -> Any:
    """Return the generation config of a folder, None if it has none; raise ConfigError if it cannot be read."""
    from transformers import GenerationConfig

    if not (folder / GENERATION_CONFIG).is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder)
    except Exception as error:  # transformers' parsers raise anything
        raise ConfigError(
            f"{folder / GENERATION_CONFIG} cannot be read ({first_line(error)}); download it again, or remove it"
        ) from error


def write_generation_config(settings: Any, folder: Path) -> None:
    """Write a generation config into a folder. transformers' own method may reject a config that was changed because of
    other settings, which came with the model: the trained weights would be lost.
    """
    settings.to_json_file(folder / GENERATION_CONFIG, keys_to_pop=["compile_config"])


def add_end_tokens(settings: Any, tokens: Sequence[int]) -> None:
    """Let answers end at further tokens, too."""
    before = end_tokens(settings)
    if new := [token for token in tokens if token not in before]:
        settings.eos_token_id = before + new


def end_tokens(settings: Any) -> list[int]:
    """Return the tokens that end an answer. A generation config has none, one or a list of them."""
    return _listed(settings.eos_token_id)


def _tokens_of_folder(settings: Any, num_tokens: int) -> dict[str, Any]:
    """Return the tokens that begin and end a text in a generation config; raise ConfigError if the vocabulary does not have them."""
    chosen = {}
    for name in ("bos_token_id", "eos_token_id"):
        value = getattr(settings, name, None)
        ids = _listed(value)
        if not all(type(each) is int and 0 <= each < num_tokens for each in ids):
            raise _invalid(name, value, f"a token from 0 to {num_tokens - 1}, or a list of such tokens")
        chosen[name] = value
    return chosen


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _numbers_of_folder(settings: Any, limits: Mapping[str, float]) -> dict[str, Any]:
    """Return the settings named in ``limits`` of a generation config; None for a setting of 0, which is switched off.

    Raises:
        ConfigError: a setting is no number, is below 0, or is above its limit.
    """
    chosen = {}
    for name, most in limits.items():
        value = getattr(settings, name, None)
        if value is not None and not (type(value) in (int, float) and 0 <= value <= most):
            raise _invalid(name, value, f"a number from 0 to {most:g}")
        chosen[name] = value or None
    return chosen


def _invalid(name: str, value: Any, wanted: str) -> ConfigError:
    """Return the error of a setting in a folder's generation config."""
    return ConfigError(f"generation_config.json: {name}: {str(value)[:80]!r} is not {wanted}; correct or remove it")


@dataclass(frozen=True, slots=True)
class Generation:
    """The sequences of a call of ``generate``.

    Attributes:
        rows: sequences with a cache of their own, such as beams.
        prompt: tokens of the longest prompt.
        length: tokens that the cache holds for a row at most.
        is_static: the cache is allocated for all tokens at once.
        is_offloaded: it is in host memory, except for the layers in use.
    """

    rows: int
    prompt: int
    length: int
    is_static: bool = False
    is_offloaded: bool = False


def generation_of(
    settings: Any, arguments: Mapping[str, Any], num_rows: int, num_tokens: int
) -> tuple[Generation, Any] | None:
    """Return the sequences of a call of ``generate``, and its cache; None if it has no cache, or one whose bytes are not known.

    Args:
        settings: the generation config of the call.
        arguments: the arguments of the model, with the cache.
        num_rows: number of prompts.
        num_tokens: tokens that the cache has to hold for a row: the longest prompt and the new tokens, except for the last.
    """
    from transformers import DynamicCache, StaticCache

    cache = cache_of(arguments)
    if type(cache) not in (DynamicCache, StaticCache):  # others hold two models' keys and values, or quantized ones
        return None
    # Without `max_new_tokens` only the total is limited, and any part of it may be the prompt.
    prompt = num_tokens if settings.max_new_tokens is None else num_tokens - (settings.max_new_tokens - 1)
    allocated = max((vars(layer).get("max_cache_len", 0) for layer in cache.layers), default=0)  # of a static cache
    rows = num_rows * max(settings.num_beams or 1, settings.num_return_sequences or 1)
    is_static = isinstance(cache, StaticCache)
    return Generation(rows, max(1, prompt), max(num_tokens, allocated), is_static, is_offloaded=cache.offloading), cache


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """Return the cache of keys and values, or of states, among the arguments of a model's call; None without one."""
    return next((arguments[name] for name in CACHES if arguments.get(name) is not None), None)


def layer_bytes(layer: Any) -> int:
    """Return the bytes of the tensors of a cache's layer, shared memory once, without its counters, which have no dimensions."""
    found = [leaf for leaf in tree_leaves(vars(layer)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    return sum({id(each): each.untyped_storage().nbytes() for each in found}.values())
