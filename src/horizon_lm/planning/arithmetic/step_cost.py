"""The cost of each operation of a planned step on a machine, and the rates of that machine."""

import math
from dataclasses import replace

from horizon_lm.common.optimizers import ADAMW, MOMENT_BYTES
from horizon_lm.common.units import EMBED, HEAD, OUTER, Unit
from horizon_lm.memory.layout.model import MatrixShape
from horizon_lm.planning.arithmetic.catalog import Hardware
from horizon_lm.planning.arithmetic.host_memory import SAVED_BYTES, WEIGHT_BYTES
from horizon_lm.planning.arithmetic.interconnect import Interconnect
from horizon_lm.planning.arithmetic.matrices import orthogonalizing_work
from horizon_lm.planning.arithmetic.outline import Work
from horizon_lm.planning.arithmetic.request import Request
from horizon_lm.planning.arithmetic.step import Step, StepSettings
from horizon_lm.planning.arithmetic.tiles import TileCost
from horizon_lm.schedule.ops import UPDATES, Kind, Op, Stream
from horizon_lm.schedule.simulate import Rates

FUSED = 0.4
"""Share of elementwise traffic that remains when compiled blocks fuse chains of operations: an assumption."""
_WEIGHT_TRAFFIC = {"fp32_master": 8, "bf16": 4, "float32": 8}  # bytes read and written by an update, per parameter
_OF_MATRICES = (Kind.STREAM_MATRICES, Kind.GATHER_MATRICES, Kind.RETURN_MATRICES)
_OF_GRADS = (Kind.STREAM_OUT, Kind.REDUCE, *_OF_MATRICES)


class StepCost:
    """The cost of each operation, for `schedule.simulate`: seconds of a computation, bytes of a transfer, host bytes of an update.

    Args:
        step: the step.
        hardware: the machine, or one rank's share of it.
        interconnect: the links between several ranks; None for one rank.
    """

    def __init__(self, step: Step, hardware: Hardware, interconnect: Interconnect | None = None) -> None:
        self._step, self._hardware, self._interconnect = step, hardware, interconnect
        self._outline, self._settings = step.outline, step.settings
        self._tiles, self._tiled = TileCost(step), step.tiled
        self._dtype = "float32" if step.outline.compute_bytes == 4 else "bfloat16"
        # Seconds of a computation, by what they depend on: its kind, the block's kind, whether its graph is kept, and the share of experts.
        self._block_costs: dict[tuple[Kind, int, bool, float], float] = {}
        self._costs: dict[tuple[Kind, Unit], float] = {}  # an operation is repeated in every step that is simulated

    def __call__(self, op: Op) -> float:
        key = (op.kind, op.unit)
        if key not in self._costs:
            self._costs[key] = self._cost(op)
        return self._costs[key]

    def _cost(self, op: Op) -> float:
        if op.kind in UPDATES:
            return self._update_bytes(op)
        if op.stream == Stream.COMPUTE:
            return self._compute_seconds(op)
        if op.kind == Kind.SAVE:
            return float(self._saved_bytes(op.unit))
        return float(self._transfer_bytes(op))

    def blocks_seconds(self, tokens: float, backward: bool) -> float:
        """Return the seconds of the forward pass, or of recomputation and backward pass, of all blocks over this many
        tokens.
        """
        rows, total = tokens / self._outline.length, 0.0
        for kind in self._outline.kinds:
            work = kind.recompute.at(rows) + kind.backward.at(rows) if backward else kind.forward.at(rows)
            total += self._device_seconds(work, self._is_compiled(kind.indices[0])) * len(kind.indices)
        return total

    # Transfers

    def _transfer_bytes(self, op: Op) -> float:
        """Return the bytes that a transfer moves for a rank: its share of a unit or, in a collective, what it receives from other ranks.

        For a tile or a core, count the rank with the largest share, since it sends more than it receives.
        """
        if op.kind in (Kind.OFFLOAD, Kind.FETCH):
            return self._step.boundary_of(op.unit.block_index)
        ranks, share = self._settings.shard.count, self._tiled.part(op.unit).largest_share()
        if op.kind == Kind.GATHER:
            return self._gathered_bytes(op, ranks, share)
        if op.kind == Kind.GATHER_MATRICES:
            return self._grad_bytes(op, self._summed_bytes(op.unit)) * (ranks - 1) / ranks
        if op.kind == Kind.REDUCE:
            copies = self._settings.num_replicas
            # In units of a rank's range: its range from the other ranks of its copy, then twice what other copies have of it, in parts.
            received = ranks - 1 + 2 * (copies - 1) / copies
            return self._grad_bytes(op, self._summed_bytes(op.unit)) * received * share
        if op.kind in _OF_GRADS:
            return self._grad_bytes(op, self._settings.grad_bytes) * share
        return self._streamed_in_bytes(op, share)

    def _grad_bytes(self, op: Op, itemsize: int) -> float:
        """Return the bytes of an operation's gradients over all ranks, with ``itemsize`` bytes an element, and 4 for weights in float32."""
        if op.unit == EMBED:
            return self._rows_numel * itemsize
        return self._tiled.part(op.unit).grad_bytes(itemsize)

    def _weight_bytes(self, op: Op, itemsize: int) -> float:
        """Return the bytes of an operation's weights over all ranks, with ``itemsize`` bytes an element, and of codes and scales."""
        if op.unit == EMBED:
            return self._rows_numel * itemsize
        return self._tiled.part(op.unit).weight_bytes(itemsize)

    # The simulation knows one cost of a transfer, its bytes. So decoding counts as the bytes that the link moves in its time.

    def _gathered_bytes(self, op: Op, ranks: int, share: float) -> float:
        """Return the bytes of weights that a rank receives from the others, plus the bytes that stand for decoding them."""
        decoding = self._decoding_seconds(op) * self._gather_rate(ranks)
        return self._weight_bytes(op, self._outline.compute_bytes) * (ranks - 1) * share + decoding

    def _streamed_in_bytes(self, op: Op, share: float) -> float:
        """Return the bytes of weights that cross the link to the device, with the bytes that stand for decoding them."""
        own = self._weight_bytes(op, WEIGHT_BYTES[self._settings.precision]) * share
        if self._step.buffer_table.gathers_packed:  # decoding follows the gather, so `_gathered_bytes` counts it
            return own
        hardware = self._hardware
        decoding = self._decoding_seconds(op) * min(hardware.link_in, hardware.host_rate)
        # A GPU decodes a part while the next one crosses the link.
        return own + decoding if hardware.on_host else max(own, decoding)

    @property
    def _rows_numel(self) -> int:
        """The elements of the rows of the table that the step reads."""
        return self._step.table_rows * self._outline.layout.hidden

    def _summed_bytes(self, unit: Unit) -> int:
        """Return the bytes of an element of a unit's gradients on the device, where ranks sum them."""
        settings = self._settings
        if unit == HEAD:
            return 4 if settings.chunked_head else self._outline.compute_bytes
        _accumulates, slot_bytes = settings.grad_slots
        return settings.grad_bytes if unit == EMBED else slot_bytes

    def _decoding_seconds(self, op: Op) -> float:
        """Return the seconds that decoding the quantized weights of an operation takes."""
        part, hardware = self._tiled.part(op.unit), self._hardware
        rate = hardware.host_rate if hardware.on_host else hardware.device_bandwidth
        return (part.packed.num_params + part.decoded_numel * self._outline.compute_bytes) / rate

    def _gather_rate(self, ranks: int) -> float:
        """Return the bytes per second of a gather, over the links between devices or, if there are none, the links to the host.

        Return 0 if there is nothing to gather, or if the links are not known: decoding then counts no bytes.
        """
        links = self._interconnect
        if links is None or ranks == 1:
            return 0.0
        rate = links.gather_rate(ranks)
        return rate if math.isfinite(rate) else min(self._hardware.link_in, self._hardware.link_out)

    # Checkpoints

    def _saved_bytes(self, unit: Unit) -> int:
        """Return the bytes of a unit in a checkpoint: weights, low halves and moments."""
        settings, slabs = self._settings, self._outline.layout.of(unit)
        of_moments = sum(
            buffer.entries[name].numel
            for names in self._step.moments
            for buffer in slabs.grad_layout.buffers
            for name in buffer
            if name in names
        )
        plain, in_float32 = (buffer.num_params for buffer in slabs.layout.buffers)
        saved = plain * SAVED_BYTES[settings.precision] + in_float32 * 4 + of_moments * MOMENT_BYTES[settings.moments]
        return saved // settings.shard.count

    # Updates

    def _update_bytes(self, op: Op) -> float:
        """Return the bytes of host memory that an update of this rank's range reads and writes.

        Matrices that are orthogonalized on the device are updated in two parts: ADVANCE before that, and the unit's update afterwards.
        """
        parameters, in_float32 = (buffer.num_params for buffer in self._outline.layout.of(op.unit).grad_layout.buffers)
        if op.unit == EMBED:  # UPDATE_ROWS updates the rows that the batch reads, UPDATE the others
            rows = self._rows_numel
            parameters = rows if op.kind == Kind.UPDATE_ROWS else parameters - rows
        settings, hardware = self._settings, self._hardware
        in_matrices = sum(map(math.prod, self._matrices(op.unit)))
        before, after = matrix_update_bytes(settings, hardware)
        if op.kind == Kind.ADVANCE:
            return in_matrices * before / settings.shard.count
        moved = (parameters - in_matrices) * update_bytes(settings, hardware) + in_matrices * after
        moved += in_float32 * update_bytes(replace(settings, precision="float32", grad_bytes=4), hardware)
        # The fixed seconds of a unit's update, as the bytes that host memory moves in that time.
        of_unit = hardware.unit_update_seconds.get(settings.precision, 0.0) * hardware.host_rate
        return of_unit + moved / settings.shard.count

    def _matrices(self, unit: Unit) -> list[MatrixShape]:
        """Return the matrices of a unit that are orthogonalized."""
        return self._outline.layout.matrices_of(unit) if unit in self._step.orthogonalized else []

    # Computation

    def _compute_seconds(self, op: Op) -> float:
        """Return the seconds of a computation."""
        if op.kind == Kind.ORTHOGONALIZE:
            return self._device_seconds(orthogonalizing_work(self._matrices(op.unit)), compiled=False, dtype="bfloat16")
        if op.unit == OUTER:
            return self._outer_seconds(op.kind)
        if op.unit == EMBED:
            return self._embedding_bytes(op.kind) / self._hardware.device_bandwidth
        if op.unit == HEAD:
            return self._device_seconds(self._head_work(op), compiled=False)
        return self._block_seconds(op)

    def _outer_seconds(self, kind: Kind) -> float:
        """Return the seconds of the code around the blocks of towers; that around the decoder's blocks takes next to nothing."""
        images = self._outline.images
        if images is None:
            return 0.0
        work = (images.forward if kind == Kind.FORWARD else images.backward).at(self._settings.rows)
        return self._device_seconds(work, compiled=False)

    def _is_compiled(self, index: int) -> bool:
        """Return whether a block is compiled: images differ too much in size for those of towers."""
        return self._settings.compiled and not self._step.is_of_tower(index)

    def _embedding_bytes(self, kind: Kind) -> int:
        """Return the device bytes read and written in looking up the rows of tokens, or in adding up their gradients."""
        rows = self._rows_numel * self._outline.compute_bytes
        return rows + self._step.hidden * (2 if kind == Kind.FORWARD else 6)

    def _block_seconds(self, op: Op) -> float:
        """Return the seconds of an operation of a block, of its core or of a tile; compute them once for all blocks of a kind."""
        index, is_cut = op.unit.block_index, self._tiled.is_cut(op.unit.block_index)
        kind = next(i for i, each in enumerate(self._outline.kinds) if index in each.indices)
        has_graph = self._settings.residency.keeps_graph(index, self._outline.num_blocks)
        share = self._tiles.share(op) if is_cut else 1.0
        key = (op.kind, kind, has_graph, share)
        if key not in self._block_costs:
            work = self._tiles.work(op, self._outline.kinds[kind]) if is_cut else self._block(op.kind, index, has_graph)
            if not op.unit.is_tile:
                work += self._casting_work(op.kind, index)
            own_code = self._device_seconds(work, self._is_compiled(index))
            self._block_costs[key] = own_code + self._engine_bytes(op) / self._hardware.device_bandwidth
        return self._block_costs[key]

    def _casting_work(self, op_kind: Kind, index: int) -> Work:
        """Return the work of casting a block's weights to FP8 before an operation, once for all micro-batches."""
        casts = self._outline.kind(index).casts
        # A forward pass without a graph casts weights for its outputs alone, not also for gradients.
        if op_kind == Kind.FORWARD and not self._settings.compiled:
            return casts * 0.5
        return casts if op_kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD) else Work()

    def _block(self, op_kind: Kind, index: int, has_graph: bool) -> Work:
        """Return the work of a block's own code, summed over micro-batches. A backward pass with a kept graph recomputes nothing."""
        kind, total = self._outline.kind(index), Work()
        if op_kind == Kind.STAGE:  # it only rounds gradients, which `_engine_bytes` counts
            return total
        for rows in self._step.slices_of(index):
            if op_kind == Kind.FORWARD:
                total += kind.forward.at(rows)
                continue
            total += kind.backward.at(rows)
            if not has_graph:
                total += kind.recompute.at(rows)
        return total

    def _engine_bytes(self, op: Op) -> float:
        """Return the device bytes that the engine moves around a block, its core or a tile: gradients into their slot, micro-batches
        into whole tensors, and the rows of a tile.
        """
        if op.kind in (Kind.ROUTE, Kind.RECOMPUTE):
            return 0.0
        parameters = self._tiled.part(op.unit).grad_layout.num_params
        num_slices = len(self._step.slices_of(op.unit.block_index))
        if op.kind == Kind.STAGE:
            return parameters * (4 + self._settings.grad_bytes)
        # fp32 accumulation reads the gradient and the sum, and writes the sum: 3 x 4 bytes.
        bytes_each = 12 if num_slices > 1 else self._outline.compute_bytes + self._settings.grad_bytes
        into_slot = parameters * bytes_each * num_slices if op.kind == Kind.BACKWARD else 0.0
        if op.unit.is_tile:
            return into_slot + self._tiles.rows_bytes(op)
        return into_slot + (2 * self._step.hidden if num_slices > 1 else 0)

    def _head_work(self, op: Op) -> Work:
        """Return the work of norm, head and loss.

        In chunks, the forward pass of a trained head computes its gradients, too, which the backward pass only scales. The backward
        pass of a frozen head computes the chunks again.
        """
        outline, tokens, chunk_tokens = self._outline, self._step.tokens, self._settings.chunk_tokens
        forward, backward = self._step.head.forward, self._step.head.backward
        if chunk_tokens is None:
            return (forward if op.kind == Kind.FORWARD else backward).at(tokens)
        is_trained = outline.layout.trained_numel(HEAD) > 0
        grad_bytes = 8.0 * outline.layout.numel(HEAD)  # of reading and writing all gradients of the head in fp32
        if op.kind == Kind.BACKWARD and is_trained:
            return Work(moved_bytes=grad_bytes + 2 * self._step.hidden)
        num_chunks = -(-tokens // chunk_tokens)
        work = forward.at(tokens / num_chunks) * num_chunks
        if is_trained or op.kind == Kind.BACKWARD:
            work += backward.at(tokens / num_chunks) * num_chunks
        num_added = num_chunks - 1 if is_trained else 0  # chunks whose gradients are added to those of the first
        return work + Work(moved_bytes=grad_bytes * num_added)

    def _device_seconds(self, work: Work, compiled: bool, dtype: str | None = None) -> float:
        """Return the seconds that the device takes for work, with products in a dtype; None for that of training."""
        hardware, dtype = self._hardware, dtype or self._dtype
        products = work.products / hardware.matmul[dtype]
        if work.float8:  # `require_float8` has rejected machines whose rate is 0
            products += work.float8 / hardware.float8
        products = max(products, work.product_bytes / hardware.device_bandwidth)
        moved = work.moved_bytes * (FUSED if compiled else 1.0) / hardware.device_bandwidth
        seconds = products + work.attention / hardware.attention[dtype] + moved
        overhead = work.num_ops * hardware.op_seconds * (FUSED if compiled else 1.0)
        # A GPU computes while the host enqueues the next operations; a CPU does both in one thread.
        return seconds + overhead if hardware.on_host else max(seconds, overhead)


def update_bytes(settings: StepSettings, hardware: Hardware) -> float:
    """Return the host bytes that an update moves per parameter. If AdamW was measured, they stand for the measured seconds."""
    moments = 2 * settings.optimizer.num_moments * MOMENT_BYTES[settings.moments]
    return _calibrated(_grad_and_weight_bytes(settings) + moments, settings, hardware)


def matrix_update_bytes(settings: StepSettings, hardware: Hardware) -> tuple[float, float]:
    """Return the host bytes, as in `update_bytes`, for an element of a matrix that is orthogonalized on the device.

    Returns:
        The bytes of the part before that, which reads and writes gradient and moment, and of the last part, which changes the weight.
    """
    before = 2 * (settings.grad_bytes + MOMENT_BYTES[settings.moments])
    after = _grad_and_weight_bytes(settings)
    return _calibrated(before, settings, hardware), _calibrated(after, settings, hardware)


def _grad_and_weight_bytes(settings: StepSettings) -> int:
    """Return the bytes that an update reads of a gradient, and reads and writes of a weight, per parameter."""
    return settings.grad_bytes + _WEIGHT_TRAFFIC[settings.precision]


def _calibrated(num_bytes: int, settings: StepSettings, hardware: Hardware) -> float:
    """Return ``num_bytes`` per parameter or, if AdamW's update was measured, the bytes that host memory moves in the time of the update.

    That time is AdamW's, in proportion to the bytes that AdamW's update moves.
    """
    seconds = hardware.update_seconds.get(settings.precision)
    if seconds is None:
        return float(num_bytes)
    of_adamw = _grad_and_weight_bytes(settings) + 2 * ADAMW.moment_bytes("float32")
    return seconds * hardware.host_rate * num_bytes / of_adamw


def rates(
    hardware: Hardware, computing_threads: int | None = None, interconnect: Interconnect | None = None,
    settings: Request | None = None,
) -> Rates:  # fmt: skip
    """Return the rates of a machine for `schedule.simulate`.

    Args:
        hardware: the machine, or one rank's share of it.
        computing_threads: threads of computation, if updates share the cores; None for all cores.
        interconnect, settings: the links between several ranks, and the settings of their step; None for one rank.
    """
    machine_rates = Rates(
        hardware.link_in, hardware.link_out, hardware.host_rate, hardware.link_both,
        disk=hardware.disk_write or float("inf"),
    )  # fmt: skip
    if hardware.on_host:
        machine_rates = _sharing_cores(machine_rates, hardware, computing_threads or hardware.cores)
    if interconnect is not None and settings is not None:
        ranks = settings.shard.count
        machine_rates = replace(
            machine_rates, gather=interconnect.gather_rate(ranks), through_host=interconnect.through_host,
            reduce=interconnect.reduce_rate(ranks, settings.num_replicas, settings.grad_bytes),
        )  # fmt: skip
    return machine_rates


def _sharing_cores(found: Rates, hardware: Hardware, computing: int) -> Rates:
    """Return the rates of a machine whose cores run both ``computing`` threads of computation and, on the others, the updates."""
    updating = max(1, hardware.cores - computing)
    share = min(1.0, hardware.cores / (computing + updating))  # the share of a core that each thread gets
    bandwidths = [bandwidth for threads, bandwidth in hardware.host_bandwidth.items() if int(threads) <= updating]
    of_updates = max(bandwidths, default=hardware.host_rate)  # the bandwidth that the updating threads reach
    return replace(
        found, link_both=None, inline=True, compute_share=share, update_share=share * of_updates / hardware.host_rate
    )
