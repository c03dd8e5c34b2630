"""Measure the device memory of generation without weights: the key-value cache, and what computes beside it.

Every block runs on the meta device with a static cache of transformers, whose layers allocate what the config says: windows, states of
linear attention, latent keys and values. A dynamic cache of as many tokens takes no more, except for the whole prompt in a window.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_map

from horizon_lm.model.attention_kernels import head_dimensions
from horizon_lm.model.block_template import structure_key
from horizon_lm.model.generation import CACHES, Generation, layer_bytes
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.source import ModelSource
from horizon_lm.model.units import find_parts
from horizon_lm.planning.measure.block_calls import call_of_each_block, find_calls, shared_bytes
from horizon_lm.planning.measure.block_probe import copy_on_meta
from horizon_lm.planning.measure.meta_recorder import recording

_LOGIT_BYTES = 16  # a logit of the last token in the model's dtype, in float32, and after processors and sampling


@dataclass(frozen=True, slots=True)
class GenerationBytes:
    """The device memory of generation beside the engine's buffers, in bytes.

    Attributes:
        cache: keys, values and states of all blocks, at their largest.
        working: peak of computations beside them.
    """

    cache: int
    working: int


class CacheProbe:
    """The memory of generation with a model.

    Args:
        source: the model.
        dtype: dtype of weights and hidden states on the device.
        accelerated: assume the kernels of a GPU.
    """

    def __init__(self, source: ModelSource, dtype: torch.dtype, accelerated: bool) -> None:
        self._source, self._dtype, self._accelerated = source, dtype, accelerated
        self._token_run: Callable[[int, int], _TokenOfRows] = cache(self._run_token)

    def cache_bytes(self, generation: Generation) -> int:
        """Return the bytes of a cache on the device, at its largest. A model that cannot be tried is assumed to cache all tokens."""
        try:
            layers = self._token_run(generation.rows, generation.length).layers
            layers_of_prompt = layers if generation.is_static else self._layers_of_prompt(generation)
        except Exception:  # the model's own code may raise any exception on the meta device
            return usual_cache_bytes(self._source.config, generation, self._dtype.itemsize)
        layers = list(map(max, layers, layers_of_prompt))
        if not generation.is_offloaded:
            return sum(layers)
        # On the device are two of the largest layers, the one in use and the one prefetched. Smaller ones, of windows and states, may stay.
        largest = max(layers)
        return 2 * largest + sum(each for each in layers if each < largest)

    def measure(self, generation: Generation) -> GenerationBytes:
        """Return the device memory of generation; computations of a model that cannot be tried are unknown, and count as 0."""
        try:
            working = self._working_peak(generation)
        except Exception:  # as in `cache_bytes`
            working = 0
        return GenerationBytes(self.cache_bytes(generation), working)

    def _working_peak(self, generation: Generation) -> int:
        """Return the peak of computations beside the cache: of one token or of the prompt, and of the logits."""
        # Both peaks have one layer more than the cache, because concatenation makes a new layer before it drops the old one.
        of_token = self._token_run(generation.rows, generation.length).peak()
        of_prompt = max(self._layers_of_prompt(generation)) + self._prompt_peak(generation.rows, generation.prompt)
        num_logits = generation.rows * self._source.config.get_text_config().vocab_size
        logits = num_logits * _LOGIT_BYTES
        if "logits_to_keep" not in inspect.signature(type(self._source.skeleton()).forward).parameters:
            logits += num_logits * generation.prompt * self._dtype.itemsize
        return max(of_token, of_prompt) + logits

    def _layers_of_prompt(self, generation: Generation) -> list[int]:
        """Return the bytes of each layer while the prompt is computed: a dynamic layer keeps all of it, even with a window."""
        # Every token adds as much as the second one.
        one, two = (self._token_run(generation.rows, length).layers for length in (1, 2))
        return [of_one + (generation.prompt - 1) * (of_two - of_one) for of_one, of_two in zip(one, two, strict=True)]

    def _prompt_peak(self, rows: int, length: int) -> int:
        """Return the peak of computing prompts, without the cache."""
        parts = find_parts(self._skeleton())
        calls = find_calls(parts, self._dtype, length, masked=True, accelerated=self._accelerated)
        hidden = rows * length * parts.hidden * self._dtype.itemsize
        peak = max(each.run(rows).forward_peak for each in calls)
        return 3 * hidden + peak + shared_bytes(calls, rows)

    def _run_token(self, rows: int, length: int) -> "_TokenOfRows":
        """Compute one token of each row with a static cache of this length."""
        return _TokenOfRows(find_parts(self._skeleton()), self._dtype, self._accelerated, rows, length)

    def _skeleton(self) -> Any:
        """Return a skeleton that the caller may change."""
        return copy.deepcopy(self._source.skeleton()).eval()


class _TokenOfRows:
    """One token of each row, computed on the meta device with a static cache.

    Attributes:
        layers: the bytes of each layer of the cache.
    """

    def __init__(self, parts: ModelParts, dtype: torch.dtype, accelerated: bool, rows: int, length: int) -> None:
        self._parts, self._dtype, self._accelerated, self._length = parts, dtype, accelerated, length
        self._cache = self._new_cache()
        accepted = inspect.signature(type(parts.model).forward).parameters
        inputs = {
            "input_ids": torch.zeros((rows, 1), dtype=torch.long),
            next(name for name in CACHES if name in accepted): self._cache,
            "use_cache": True,
        }
        self._calls = call_of_each_block(parts, dtype, inputs)
        # The pass has ended where the last block was called; computing it allocates its layer, too.
        self._peak_of(parts.num_blocks - 1, self._cache)
        self.layers = [layer_bytes(layer) for layer in self._cache.layers]

    def peak(self) -> int:
        """Return the peak of a block with its layer of the cache, over all blocks."""
        # One block of each structure and size of its layer.
        pairs = zip(self._parts.decoder_blocks, self.layers, strict=True)
        alike = {(structure_key(self._parts.blocks[index]), layer): index for index, layer in pairs}
        cache = self._new_cache()
        return max(self._peak_of(index, cache) for index in alike.values())

    def _peak_of(self, index: int, cache: Any) -> int:
        """Compute a block on the meta device with a cache that has not seen the token yet, and return the peak bytes.

        The block fills its layer of the cache, whose memory is part of the peak.
        """
        args, kwargs = tree_map(lambda leaf: cache if leaf is self._cache else leaf, self._calls[index])
        in_float32 = self._parts.in_float32_inside(self._parts.block_names[index])
        module, args, kwargs = copy_on_meta(self._parts.blocks[index], args, kwargs, self._dtype, in_float32)
        with recording(module, args, kwargs, accelerated=self._accelerated) as recorder, torch.no_grad():
            module.forward(*args, **kwargs)
        return recorder.peak

    def _new_cache(self) -> Any:
        """Return an empty static cache."""
        from transformers import StaticCache

        return StaticCache(config=self._parts.model.config, max_cache_len=self._length)


def usual_cache_bytes(config: Any, generation: Generation, itemsize: int) -> int:
    """Return the bytes of keys and values of all blocks, as most models keep them.

    Args:
        config: the model's config.
        generation: the sequences.
        itemsize: bytes of a number.
    """
    config = config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not heads:  # a recurrent state, whose size does not depend on the tokens
        return 0
    width = max(head_dimensions(config))
    if getattr(config, "kv_lora_rank", None) is None:  # latent attention caches its keys and values expanded
        heads = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * config.num_hidden_layers * heads * width * itemsize * generation.rows * generation.length)
