"""A training step as run by the engine: its settings, its passes, and the cost of each operation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from horizon_lm.planning.catalog import Hardware
from horizon_lm.planning.interconnect import Interconnect
from horizon_lm.planning.memory import (
    ADAMW,
    LOW_HALF_BYTES,
    WEIGHT_BYTES,
    BufferSettings,
    HostSettings,
    ModelSizes,
    PlannedOptimizer,
)
from horizon_lm.planning.outline import ModelOutline, Work
from horizon_lm.planning.request import Request
from horizon_lm.planning.residency import Residency
from horizon_lm.schedule import build
from horizon_lm.schedule.ops import UPDATES, Kind, Op, Pass, Stream
from horizon_lm.schedule.simulate import Rates
from horizon_lm.streaming_options import chosen
from horizon_lm.units import EMBED, HEAD, OUTER, Unit, block

FUSED = 0.4
"""Share of elementwise traffic that remains when compiled blocks fuse chains of operations: an assumption."""
_WEIGHT_TRAFFIC = {"fp32_master": 8, "bf16": 4, "float32": 8}  # bytes read and written by an update, per parameter


@dataclass(frozen=True, kw_only=True)
class StepSettings(Request):
    """A request whose open settings are chosen. ``head_chunk_tokens``: tokens of a chunk of logits."""

    head_chunk_tokens: int = chosen(64)
    activation_checkpoints: int = chosen(0)
    resident_blocks: int = chosen(0)
    resident_graphs: int = chosen(0)

    @property
    def residency(self) -> Residency:
        """The data that stays on the device."""
        return Residency.of(self)

    @property
    def grad_slots(self) -> tuple[bool, int]:
        """As in `Shard.grad_slots`."""
        return self.shard.grad_slots(self.in_micro_batches, self.grad_bytes)

    def keeping(self, residency: Residency) -> Self:
        """Return these settings with another residency."""
        return replace(self, **residency.options())

    @property
    def slices(self) -> list[int]:
        """Sizes of the device micro-batches."""
        size = self.rows_at_once(self.rows)
        return [min(size, self.rows - start) for start in range(0, self.rows, size)]


@dataclass(frozen=True, slots=True)
class Step:
    """A training step of a model with given settings."""

    outline: ModelOutline
    settings: StepSettings

    @property
    def tokens(self) -> int:
        return self.settings.rows * self.outline.length

    @property
    def table_rows(self) -> int:
        """Upper bound on the number of distinct table rows that the step reads."""
        return self._distinct(self.tokens * self.settings.num_ranks)

    def _distinct(self, tokens: int) -> int:
        vocabulary = self.outline.sizes.vocabulary
        return min(tokens, vocabulary, self.settings.distinct_tokens or vocabulary)

    @property
    def boundary(self) -> int:
        """Bytes of one block's input for the whole batch (B, T, H)."""
        return self.tokens * self.outline.sizes.hidden * self.outline.compute_bytes

    @property
    def offloaded(self) -> int:
        """Number of first blocks with their boundary in host memory, as in the schedule."""
        return self.outline.num_blocks - self.settings.residency.boundaries

    @property
    def waiting(self) -> int:
        """Number of boundaries in host memory, not counting blocks without a gradient, which keep none."""
        return max(0, self.offloaded - self.outline.first_differentiated)

    @property
    def staying(self) -> int:
        """Number of boundaries that stay on the device."""
        return min(self.settings.residency.boundaries, self.outline.num_blocks - self.outline.first_differentiated)

    @property
    def gathers_packed(self) -> bool:
        """True if ranks gather codes and scales of quantized weights, and decode them there."""
        return any(self.settings.shard.packed_slot(each.slab_bytes)[-1] for each in self.outline.sizes.packed)

    def buffer_settings(self) -> BufferSettings:
        """Return the settings that determine the engine's device buffers."""
        settings = self.settings
        return BufferSettings(
            tokens=self.tokens,
            compute_bytes=self.outline.compute_bytes,
            grad_bytes=settings.grad_bytes,
            micro_batches=settings.in_micro_batches,
            chunked_head=settings.chunked_head,
            offloaded=self.waiting,
            resident=settings.residency.weights,
            table_rows=self.table_rows,
            forward_table_rows=max(
                (self._distinct(each.rows * each.length * settings.num_ranks) for each in settings.forwards), default=0
            ),
            shard=settings.shard,
        )

    def host_settings(self) -> HostSettings:
        """Return the settings that determine the bytes in host memory."""
        settings = self.settings
        return HostSettings(
            precision=settings.precision,
            moments=settings.moments,
            optimizer=settings.optimizer,
            grad_bytes=settings.grad_bytes,
            update_in_backward=settings.update_in_backward,
            rows=self.table_rows,
            boundary=self.boundary,
            offloaded=self.waiting,
            frozen_base=self.outline.base_is_frozen,
            shard=settings.shard,
        )

    @property
    def layout(self) -> build.Layout:
        """The properties of the step that shape its schedule."""
        settings = self.settings
        return build.Layout(
            num_blocks=self.outline.num_blocks,
            tied=self.outline.trained.tied,
            offloaded=self.offloaded,
            resident=settings.residency.weights,
            accumulate=settings.grad_slots[0],
            update_in_backward=settings.update_in_backward,
            adapters=self.outline.has_adapters,
            sharded=settings.num_ranks > 1,
            packed=self.gathers_packed,
        )

    def passes(self) -> list[Pass]:
        """Return the forward, backward and update passes of one step among many."""
        settings, trained, layout = self.settings, self.outline.trained, self.layout
        blocks = range(self.outline.first_differentiated, layout.num_blocks)
        units = [OUTER, *map(block, range(layout.num_blocks)), HEAD]
        is_trained = {unit: sum(_sizes_of(unit, trained)) > 0 for unit in (EMBED, *units)}
        updated = [u for u in units if is_trained[u] and not (u == HEAD and trained.tied)]
        head_grads = settings.chunked_head and is_trained[HEAD]
        forward = build.forward(
            layout,
            keeps=blocks,
            blocks_changed=any(is_trained[block(u)] for u in range(layout.num_blocks)),
            table_update=is_trained[EMBED],
            head_grads=head_grads,
        )
        backward = build.backward(
            layout, blocks=blocks, trainable=[u for u in (EMBED, *units) if is_trained[u]], head_grads=head_grads
        )
        return [forward, backward, *([] if settings.update_in_backward else [build.update(layout, updated)])]

    def save_passes(self) -> list[Pass]:
        """Return the passes of a step before which a checkpoint is begun."""
        forward, *others = self.passes()
        table = bool(self.outline.trained.table)
        save = build.save(self.layout, [unit for unit in self.saved_units if unit != EMBED or not table])
        return [save, forward, *([build.save_table(self.layout)] if table else []), *others]

    @property
    def saved_units(self) -> list[Unit]:
        """The units of a checkpoint: all that have slabs, or only the trained ones if the base of adapters is frozen."""
        sizes = self.outline.trained if self.outline.base_is_frozen else self.outline.sizes
        units = [EMBED, *map(block, range(self.outline.num_blocks)), *([] if sizes.tied else [HEAD]), OUTER]
        return [unit for unit in units if sum(_sizes_of(unit, sizes))]

    def cost(self, hardware: Hardware, interconnect: Interconnect | None = None) -> "StepCost":
        """Return the costs of the step's operations on a machine, for `schedule.simulate`.

        Args:
            hardware: the machine, or one rank's share of it.
            interconnect: the links between several ranks; None for one rank.
        """
        return StepCost(self, hardware, interconnect)


_OF_GRADS = (Kind.STREAM_OUT, Kind.REDUCE)


def _sizes_of(unit: Unit, sizes: ModelSizes) -> Sequence[int]:
    """Return the elements of each tensor of a unit, of whatever dtype."""
    if unit == EMBED:
        return sizes.table
    if unit == HEAD:
        return sizes.head
    own = sizes.outer if unit == OUTER else sizes.blocks[unit.block_index]
    return own if sizes.in_float32 is None else [*own, *_sizes_of(unit, sizes.in_float32)]


def _in_float32(unit: Unit, sizes: ModelSizes) -> int:
    """Return the elements of a unit that are kept in float32."""
    return 0 if sizes.in_float32 is None else sum(_sizes_of(unit, sizes.in_float32))


class StepCost:
    """The cost of each operation: seconds of a computation, bytes of a transfer, host bytes of an update.

    Args:
        step, hardware, interconnect: as in `Step.cost`.
    """

    def __init__(self, step: Step, hardware: Hardware, interconnect: Interconnect | None = None) -> None:
        self._step, self._hardware, self._interconnect = step, hardware, interconnect
        self._outline, self._settings = step.outline, step.settings
        self._dtype = "float32" if step.outline.compute_bytes == 4 else "bfloat16"
        self._known: dict[tuple[Kind, int, bool], float] = {}

    def __call__(self, op: Op) -> float:
        if op.kind in UPDATES:
            return self._update(op)
        if op.stream == Stream.COMPUTE:
            return self._compute(op)
        if op.kind == Kind.SAVE:
            return float(self._saved(op.unit))
        return float(self._transfer(op))

    def blocks_seconds(self, tokens: float, backward: bool) -> float:
        """Return the seconds of the forward pass, or of recomputation and backward pass, of all blocks over this many
        tokens.
        """
        rows, total = tokens / self._outline.length, 0.0
        for kind in self._outline.kinds:
            work = kind.forward.at(rows)
            if backward:
                work += kind.backward.at(rows)
            total += self._seconds(work, self._settings.compiled) * len(kind.indices)
        return total

    # Transfers

    def _transfer(self, op: Op) -> float:
        """Return the bytes that a transfer moves: those of this rank's share, or those that it receives from other ranks."""
        if op.kind in (Kind.OFFLOAD, Kind.FETCH):
            return self._step.boundary
        ranks = self._settings.shard.count
        sizes = self._outline.trained if op.kind in _OF_GRADS else self._outline.sizes
        elements, in_float32 = self._elements(op.unit, sizes), _in_float32(op.unit, sizes)
        packed, decoded = 0, 0  # bytes of codes and scales, and elements of what they are decoded to
        if op.unit.is_block and op.kind in (Kind.STREAM_IN, Kind.GATHER):
            quantized = self._outline.sizes.packed_of(op.unit.block_index)
            packed, decoded = quantized.num_bytes, sum(quantized.tensors)
        if op.kind == Kind.GATHER:
            itemsize = self._outline.compute_bytes
            held = (elements - decoded) * itemsize + in_float32 * (4 - itemsize) + packed
            received = held * (ranks - 1) / ranks
            return received + self._decoding_seconds(packed, decoded) * self._gather_rate(ranks)
        if op.kind == Kind.REDUCE:
            copies = self._settings.num_replicas
            parts = ranks - 1 + 2 * (copies - 1) / copies  # within a copy, then the own range over the copies
            itemsize = self._summed_bytes(op.unit)
            return (elements * itemsize + in_float32 * (4 - itemsize)) * parts / ranks
        itemsize = self._settings.grad_bytes if op.kind == Kind.STREAM_OUT else WEIGHT_BYTES[self._settings.precision]
        moved = ((elements - decoded) * itemsize + in_float32 * (4 - itemsize) + packed) / ranks
        if self._step.gathers_packed:  # decoded once it is gathered
            return moved
        hardware = self._hardware
        decoding = self._decoding_seconds(packed, decoded) * min(hardware.link_in, hardware.host_rate)
        # A GPU decodes a part while the next one crosses the link.
        return moved + decoding if hardware.on_host else max(moved, decoding)

    def _elements(self, unit: Unit, sizes: ModelSizes) -> int:
        if unit == EMBED:
            return self._step.table_rows * sizes.hidden
        return sum(_sizes_of(unit, sizes))

    def _summed_bytes(self, unit: Unit) -> int:
        """Return the bytes of an element of a unit's gradients on the device, where ranks sum them."""
        settings = self._settings
        if unit == HEAD:
            return 4 if settings.chunked_head else self._outline.compute_bytes
        return settings.grad_bytes if unit == EMBED else settings.grad_slots[1]

    def _decoding_seconds(self, num_bytes: int, numel: int) -> float:
        """Return the seconds that decoding takes."""
        hardware = self._hardware
        rate = hardware.host_rate if hardware.on_host else hardware.device_bandwidth
        return (num_bytes + numel * self._outline.compute_bytes) / rate

    def _gather_rate(self, ranks: int) -> float:
        """Return the bytes per second of a gather that crosses no link to the host; 0 if the links are not known."""
        links = self._interconnect
        if links is None or ranks == 1:
            return 0.0
        rate = links.gather_rate(ranks)
        return rate if math.isfinite(rate) else min(self._hardware.link_in, self._hardware.link_out)

    # Checkpoints

    def _saved(self, unit: Unit) -> int:
        """Return the bytes of a unit in a checkpoint: weights, low halves and moments."""
        settings, sizes = self._settings, self._outline.sizes
        per_weight = WEIGHT_BYTES[settings.precision] + LOW_HALF_BYTES[settings.precision]
        per_trained = settings.optimizer.moment_bytes(settings.moments)
        saved = sum(_sizes_of(unit, sizes)) * per_weight + sum(_sizes_of(unit, self._outline.trained)) * per_trained
        saved += _in_float32(unit, sizes) * (4 - per_weight)
        return saved // self._settings.shard.count

    # Updates

    def _update(self, op: Op) -> float:
        parameters = sum(_sizes_of(op.unit, self._outline.trained))
        if op.unit == EMBED:  # UPDATE_ROWS updates the rows that the batch reads, UPDATE the others
            rows = self._step.table_rows * self._outline.sizes.hidden
            parameters = rows if op.kind == Kind.UPDATE_ROWS else parameters - rows
        settings, hardware = self._settings, self._hardware
        moved = parameters * update_bytes(settings, hardware)
        if in_float32 := _in_float32(op.unit, self._outline.trained):
            own = replace(settings, precision="float32", grad_bytes=4)
            moved += in_float32 * (update_bytes(own, hardware) - update_bytes(settings, hardware))
        return moved / settings.shard.count

    # Computation

    def _compute(self, op: Op) -> float:
        if op.unit in (EMBED, OUTER):
            moved = self._step.table_rows * self._outline.sizes.hidden * self._outline.compute_bytes
            moved += self._step.boundary * (2 if op.kind == Kind.FORWARD else 6)
            return moved / self._hardware.device_bandwidth if op.unit == EMBED else 0.0
        if op.unit == HEAD:
            return self._seconds(self._head(op), compiled=False)
        index = op.unit.block_index
        kind = next(i for i, each in enumerate(self._outline.kinds) if index in each.indices)
        has_graph = index >= self._outline.num_blocks - self._settings.residency.graphs
        key = (op.kind, kind, has_graph)
        if key not in self._known:
            of_block = self._seconds(self._block(op.kind, index, has_graph), self._settings.compiled)
            self._known[key] = of_block + self._around_block(op.kind, index) / self._hardware.device_bandwidth
        return self._known[key]

    def _block(self, what: Kind, index: int, has_graph: bool) -> Work:
        """Return the work of a block's own code, summed over micro-batches."""
        kind, total = self._outline.kind(index), Work()
        for rows in self._settings.slices if what != Kind.STAGE else ():
            if what == Kind.FORWARD or not has_graph:
                total += kind.forward.at(rows)
            if what == Kind.BACKWARD:
                total += kind.backward.at(rows)
        return total

    def _around_block(self, what: Kind, index: int) -> float:
        """Return the device bytes that the engine moves: gradients into their slot, micro-batches into
        whole tensors.
        """
        parameters, grad = sum(_sizes_of(block(index), self._outline.sizes)), self._settings.grad_bytes
        if what == Kind.STAGE:
            return parameters * (4 + grad)
        num_slices = len(self._settings.slices)
        concatenated = 2 * self._step.boundary if num_slices > 1 else 0
        if what == Kind.FORWARD:
            return concatenated
        # fp32 accumulation reads the gradient and the sum, and writes the sum: 3 x 4 bytes.
        into_slot = 12 if num_slices > 1 else self._outline.compute_bytes + grad
        return concatenated + parameters * into_slot * num_slices

    def _head(self, op: Op) -> Work:
        trained, tokens = bool(self._outline.trained.head), self._step.tokens
        outline, settings = self._outline, self._settings
        weights = sum(outline.sizes.head)
        forward, backward = outline.head_forward, outline.head_backward
        if settings.chunk_tokens is None:
            return (forward if op.kind == Kind.FORWARD else backward).at(tokens)
        if op.kind == Kind.BACKWARD and trained:  # the forward pass computed the gradients, which are only scaled here
            return Work(moved_bytes=8.0 * weights + 2 * self._step.boundary)
        chunks = -(-tokens // settings.chunk_tokens)
        work = forward.at(tokens / chunks) * chunks
        if trained or op.kind == Kind.BACKWARD:
            work += backward.at(tokens / chunks) * chunks
        return work + Work(moved_bytes=8.0 * weights * (chunks - 1 if trained else 0))

    def _seconds(self, work: Work, compiled: bool) -> float:
        hardware = self._hardware
        products = max(
            work.products / hardware.matmul[self._dtype], work.product_bytes / hardware.device_bandwidth
        )  # fmt: skip
        moved = work.moved_bytes * (FUSED if compiled else 1.0) / hardware.device_bandwidth
        seconds = products + work.attention / hardware.attention[self._dtype] + moved
        overhead = work.num_ops * hardware.op_seconds * (FUSED if compiled else 1.0)
        # A GPU computes while the host enqueues the next operations; a CPU does both in one thread.
        return seconds + overhead if hardware.on_host else max(seconds, overhead)


def update_bytes(settings: StepSettings, hardware: Hardware) -> float:
    """Return the host traffic of an update per parameter, or the bytes corresponding to its measured seconds."""

    def traffic(optimizer: PlannedOptimizer, moments: str) -> int:
        return settings.grad_bytes + _WEIGHT_TRAFFIC[settings.precision] + 2 * optimizer.moment_bytes(moments)

    own = traffic(settings.optimizer, settings.moments)
    seconds = hardware.update_seconds.get(settings.precision)
    if seconds is None:
        return float(own)
    return seconds * hardware.host_rate * own / traffic(ADAMW, "float32")


def rates(
    hardware: Hardware,
    computing_threads: int | None = None,
    interconnect: Interconnect | None = None,
    settings: Request | None = None,
) -> Rates:
    """Return the rates of a machine for `schedule.simulate`.

    Args:
        hardware: the machine, or one rank's share of it.
        computing_threads: threads of computation, if updates share the cores; None for all cores.
        interconnect, settings: the links between several ranks, and the settings of their step; None for one rank.
    """
    alone = _rates_alone(hardware, computing_threads)
    if interconnect is None or settings is None:
        return alone
    ranks = settings.shard.count
    return replace(
        alone,
        gather=interconnect.gather_rate(ranks),
        reduce=interconnect.reduce_rate(ranks, settings.num_replicas, settings.grad_bytes),
        through_host=interconnect.through_host,
    )


def _rates_alone(hardware: Hardware, computing_threads: int | None) -> Rates:
    disk = hardware.disk_write or float("inf")
    if not hardware.on_host:
        return Rates(hardware.link_in, hardware.link_out, hardware.host_rate, hardware.link_both, disk=disk)
    computing = computing_threads or hardware.cores
    updating = max(1, hardware.cores - computing)
    share = min(1.0, hardware.cores / (computing + updating))  # more threads than cores share them
    known = [bandwidth for threads, bandwidth in hardware.host_bandwidth.items() if int(threads) <= updating]
    alone = max(known, default=hardware.host_rate)
    return Rates(
        hardware.link_in, hardware.link_out, hardware.host_rate, inline=True, compute_share=share,
        update_share=share * alone / hardware.host_rate, disk=disk,
    )  # fmt: skip
