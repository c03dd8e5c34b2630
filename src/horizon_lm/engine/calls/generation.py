"""Make room on the device for the key-value cache of ``generate`` before its first token.

The cache is all that outlives the forward passes of a call. Blocks whose weights are resident are given up for the time of the call if the
cache does not fit beside them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from horizon_lm.common.constants import DEVICE_MARGIN
from horizon_lm.common.quantities import counted, format_bytes
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.residency_planner import buffer_settings
from horizon_lm.errors import DeviceMemoryError
from horizon_lm.memory.layout.buffers import BufferTable, buffer_bytes
from horizon_lm.model.generation import Generation, layer_bytes
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.measure.cache_probe import CacheProbe, GenerationBytes


class GenerationMemory:
    """The room on the device for the key-value caches of a model.

    Args:
        engine: the model's engine.

    Attributes:
        peak: planned peak of the last call for which room was made, with the engine's buffers, in bytes; None before the first one.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.peak: int | None = None

    @cached_property
    def _probe(self) -> CacheProbe:
        """The probe of the memory that generation with this model takes."""
        config, options = self._engine.parts.model.config, self._engine.options
        on_host = self._engine.device.torch_device.type == "cpu"
        source = ModelSource(config, type(config).__name__)
        return CacheProbe(source, options.compute_dtype, accelerated=not on_host)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Context manager: run a call of ``generate``. The blocks that are resident before it are resident after it."""
        engine, before = self._engine, self._engine.residency
        try:
            yield
        finally:
            if engine.residency != before and not engine.device_lost:
                engine.device.trim()  # the allocator has cached memory in sizes of the cache
                engine.change_residency(before)

    def describe(self, generation: Generation) -> str:
        """Return the size of the key-value cache of a call, as a line for people."""
        size = format_bytes(self._probe.cache_bytes(generation))
        return f"key-value cache: {size} for {counted(generation.rows, 'row')} of {generation.length:,} tokens"

    def reserve(self, generation: Generation, cache: Any) -> None:
        """Give up as few resident blocks as the cache of a call needs. All ranks call this.

        Args:
            generation: the sequences of the call.
            cache: the cache, whose layers that exist already need no more room.

        Raises:
            DeviceMemoryError: the call does not fit on the device even with the fewest blocks that may stay resident.
        """
        engine = self._engine
        spare = engine.device.spare_bytes()
        if spare is None:  # the device's memory is host memory
            return
        needed = self._probe.measure(generation)
        beside_buffers = needed.cache - sum(map(layer_bytes, cache.layers)) + needed.working
        # Bytes for buffers and cache: what is free, and what the engine's buffers take now.
        available = int(spare * (1 - DEVICE_MARGIN)) + engine.device.counters.allocated_total
        # The graphs of a forward pass that awaits its backward pass rely on the present blocks, so none of these is given up then.
        fewest = engine.residency.weights if engine.between.awaits_backward() else 0
        resident = engine.residency.weights  # a number of blocks
        while resident > fewest and self._buffer_bytes(generation, resident) + beside_buffers > available:
            resident -= 1
        buffers = self._buffer_bytes(generation, resident)
        self.peak = buffers + beside_buffers
        shortage = self._shortage(generation, needed, buffers, available) if self.peak > available else ""
        self._agree_on_residency(resident, shortage)

    def _agree_on_residency(self, resident: int, shortage: str) -> None:
        """Change the residency to as few blocks as the rank with the least memory can keep, or raise its error on all ranks.

        Args:
            resident: blocks that may stay resident on this rank.
            shortage: why the call does not fit on this rank; empty if it does.
        """
        engine = self._engine
        own = (resident, shortage)
        rooms = engine.mesh.exchange("the room for a key-value cache", own)
        for _, message in rooms:
            if message:
                raise DeviceMemoryError(message)
        kept = min(weights for weights, _ in rooms)
        if kept < engine.residency.weights:
            before = engine.residency
            engine.change_residency(replace(before, weights=kept, graphs=min(before.graphs, kept)))
            engine.device.trim()

    def _buffer_bytes(self, generation: Generation, resident: int) -> int:
        """Return the bytes of the engine's buffers in a call with so many resident blocks. Buffers that are larger already stay so."""
        engine, prompt_tokens = self._engine, generation.rows * generation.prompt
        settings = replace(buffer_settings(engine, prompt_tokens, offloaded=()), resident=resident)
        planned = buffer_bytes(engine.tiles, BufferTable(engine.tiles, settings.options), settings)
        # No backward pass follows, so no gradients.
        needed = {kind: num_bytes for kind, num_bytes in planned.items() if "grad" not in kind}
        allocated = engine.device.counters.allocated
        of_blocks = ("weight_slots", "resident_weights")  # kinds whose size follows the number of resident blocks
        return sum(
            needed.get(kind, 0) if kind in of_blocks else max(needed.get(kind, 0), allocated[kind])
            for kind in {*needed, *allocated}
        )

    def _shortage(self, generation: Generation, needed: GenerationBytes, buffers: int, available: int) -> str:
        """Return the message of the error for a call that does not fit."""
        assert self.peak is not None
        return (
            f"generate needs {format_bytes(self.peak)} of device memory, of {format_bytes(available)}: {self.describe(generation)}, "
            f"{format_bytes(needed.working)} for computing, {format_bytes(buffers)} for buffers. Generate fewer rows at once or fewer "
            "tokens (max_new_tokens), or set cache_implementation='offloaded', which keeps the cache in host memory"
        )
