"""A training step as the engine will run it: its settings, its passes, and what each of their operations costs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from horizon_lm.plan.catalog import Hardware
from horizon_lm.plan.memory import MOMENT_BYTES, WEIGHT_BYTES, BufferSettings, HostSettings, ModelSizes
from horizon_lm.plan.outline import ModelOutline, Work
from horizon_lm.plan.request import FixedSettings
from horizon_lm.plan.residency import Residency
from horizon_lm.schedule import build
from horizon_lm.schedule.ops import EMBED, HEAD, OUTER, UPDATES, Kind, Op, Pass, Stream, block
from horizon_lm.schedule.simulate import Rates

FUSED = 0.4
"""Share of elementwise traffic that is left when blocks are compiled: an assumption, chains of operations become one."""
_WEIGHT_TRAFFIC = {"fp32_master": 8, "bf16": 4, "float32": 8}  # of an update, per parameter: read and written


@dataclass(frozen=True, slots=True)
class StepSettings(FixedSettings):
    """What of a run's settings, and of what was chosen for it, shapes a step.

    Attributes:
        rows: of a step.
        micro_batch: rows on the device at once inside a block; None for all.
        chunked_head: the loss is computed over chunks of tokens.
        head_chunk_tokens: so many at once.
        residency: what stays on the device.
    """

    rows: int
    micro_batch: int | None = None
    chunked_head: bool = True
    head_chunk_tokens: int = 64
    residency: Residency = field(default_factory=lambda: Residency(0))

    @property
    def slices(self) -> list[int]:
        """Rows of each device micro-batch."""
        size = min(self.micro_batch or self.rows, self.rows)
        return [min(size, self.rows - start) for start in range(0, self.rows, size)]


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a model with given settings."""

    outline: ModelOutline
    settings: StepSettings

    @property
    def tokens(self) -> int:
        return self.settings.rows * self.outline.length

    @property
    def table_rows(self) -> int:
        """Distinct rows of the table that are read: as many as there can be, if no token comes twice."""
        return self._distinct(self.tokens)

    def _distinct(self, tokens: int) -> int:
        vocabulary = self.outline.sizes.vocabulary
        return min(tokens, vocabulary, self.settings.distinct_tokens or vocabulary)

    @property
    def boundary(self) -> int:
        """Bytes of one block's input, for the whole batch."""
        return self.tokens * self.outline.sizes.hidden * self.outline.compute_bytes

    @property
    def offloaded(self) -> int:
        """So many of the first blocks keep their boundary in host memory."""
        return self.outline.num_blocks - self.settings.residency.boundaries

    @property
    def waiting(self) -> int:
        """Boundaries that wait in host memory: blocks that no gradient passes through have none."""
        return max(0, self.offloaded - self.outline.first_differentiated)

    @property
    def staying(self) -> int:
        """Boundaries that stay on the device."""
        return min(self.settings.residency.boundaries, self.outline.num_blocks - self.outline.first_differentiated)

    def buffer_settings(self) -> BufferSettings:
        settings = self.settings
        return BufferSettings(
            tokens=self.tokens,
            compute_bytes=self.outline.compute_bytes,
            grad_bytes=settings.grad_bytes,
            micro_batches=settings.micro_batch is not None,
            chunked_head=settings.chunked_head,
            offloaded=self.waiting,
            held=settings.residency.weights,
            table_rows=self.table_rows,
            forward_table_rows=max((self._distinct(each.rows * each.length) for each in settings.forwards), default=0),
        )

    def host_settings(self) -> HostSettings:
        settings = self.settings
        return HostSettings(
            precision=settings.precision,
            moments=settings.moments,
            grad_bytes=settings.grad_bytes,
            update_in_backward=settings.update_in_backward,
            rows=self.table_rows,
            boundary=self.boundary,
            offloaded=self.waiting,
        )

    def passes(self) -> list[Pass]:
        """Forward, backward and update of one step among many."""
        settings, trained = self.settings, self.outline.trained
        accumulate = settings.micro_batch is not None and settings.grad_bytes < 4
        layout = build.Layout(
            num_blocks=self.outline.num_blocks,
            tied=trained.tied,
            offloaded=self.offloaded,
            held=settings.residency.weights,
            accumulate=accumulate,
            update_in_backward=settings.update_in_backward,
        )
        blocks = range(self.outline.first_differentiated, layout.num_blocks)
        units = [OUTER, *map(block, range(layout.num_blocks)), HEAD]
        is_trained = {unit: bool(_sizes_of(unit, trained)) for unit in (EMBED, *units)}
        updated = [u for u in units if is_trained[u] and not (u == HEAD and trained.tied)]
        head_grads = settings.chunked_head and is_trained[HEAD]
        forward = build.forward(layout, keeps=blocks, table_update=is_trained[EMBED], head_grads=head_grads)
        backward = build.backward(
            layout, blocks=blocks, trainable=[u for u in (EMBED, *units) if is_trained[u]], head_grads=head_grads
        )
        return [forward, backward, *([] if settings.update_in_backward else [build.update(layout, updated)])]

    def cost(self, hardware: Hardware) -> "StepCost":
        """Costs for `schedule.simulate` on a machine."""
        return StepCost(self, hardware)


def _sizes_of(unit: str, sizes: ModelSizes) -> Sequence[int]:
    if unit == EMBED:
        return sizes.table
    if unit == HEAD:
        return sizes.head
    return sizes.outer if unit == OUTER else sizes.blocks[int(unit.removeprefix("block"))]


class StepCost:
    """Seconds of computations, bytes of transfers, bytes of host traffic of updates."""

    def __init__(self, step: Step, hardware: Hardware) -> None:
        self._step, self._hardware = step, hardware
        self._outline, self._settings = step.outline, step.settings
        self._dtype = "float32" if step.outline.compute_bytes == 4 else "bfloat16"
        self._known: dict[tuple[Kind, int, bool], float] = {}

    def __call__(self, op: Op) -> float:
        if op.kind in UPDATES:
            return self._update(op)
        if op.stream == Stream.COMPUTE:
            return self._compute(op)
        return float(self._transfer(op))

    def blocks_seconds(self, tokens: float, backward: bool) -> float:
        """Of all blocks' forward, or recomputation and backward, over so many tokens at once."""
        rows, total = tokens / self._outline.length, 0.0
        for kind in self._outline.kinds:
            work = kind.forward.at(rows)
            if backward:
                work += kind.backward.at(rows)
            total += self._seconds(work, self._settings.compiled) * len(kind.indices)
        return total

    # Transfers

    def _transfer(self, op: Op) -> int:
        if op.kind in (Kind.OFFLOAD, Kind.FETCH):
            return self._step.boundary
        outgoing = op.kind == Kind.STREAM_OUT
        itemsize = self._settings.grad_bytes if outgoing else WEIGHT_BYTES[self._settings.precision]
        if op.unit == EMBED:
            return self._step.table_rows * self._outline.sizes.hidden * itemsize
        return sum(_sizes_of(op.unit, self._outline.trained if outgoing else self._outline.sizes)) * itemsize

    # Updates

    def _update(self, op: Op) -> float:
        parameters = sum(_sizes_of(op.unit, self._outline.trained))
        if op.unit == EMBED:  # the rows that the batch reads come first, then the others
            rows = self._step.table_rows * self._outline.sizes.hidden
            parameters = rows if op.kind == Kind.UPDATE_ROWS else parameters - rows
        return parameters * update_bytes(self._settings, self._hardware)

    # Computation

    def _compute(self, op: Op) -> float:
        if op.unit in (EMBED, OUTER):
            moved = self._step.table_rows * self._outline.sizes.hidden * self._outline.compute_bytes
            moved += self._step.boundary * (2 if op.kind == Kind.FORWARD else 6)
            return moved / self._hardware.device_bandwidth if op.unit == EMBED else 0.0
        if op.unit == HEAD:
            return self._seconds(self._head(op), compiled=False)
        index = int(op.unit.removeprefix("block"))
        kind = next(i for i, each in enumerate(self._outline.kinds) if index in each.indices)
        has_graph = index >= self._outline.num_blocks - self._settings.residency.graphs
        key = (op.kind, kind, has_graph)
        if key not in self._known:
            of_block = self._seconds(self._block(op.kind, index, has_graph), self._settings.compiled)
            self._known[key] = of_block + self._around_block(op.kind, index) / self._hardware.device_bandwidth
        return self._known[key]

    def _block(self, what: Kind, index: int, has_graph: bool) -> Work:
        """What the block's own code does, slice by slice."""
        kind, total = self._outline.kind(index), Work()
        for rows in self._settings.slices if what != Kind.STAGE else ():
            if what == Kind.FORWARD or not has_graph:
                total += kind.forward.at(rows)
            if what == Kind.BACKWARD:
                total += kind.backward.at(rows)
        return total

    def _around_block(self, what: Kind, index: int) -> float:
        """Bytes that the engine moves on the device: gradients into their slot, slices into whole tensors."""
        parameters, grad = sum(self._outline.sizes.blocks[index]), self._settings.grad_bytes
        if what == Kind.STAGE:
            return parameters * (4 + grad)
        num_slices = len(self._settings.slices)
        put_together = 2 * self._step.boundary if num_slices > 1 else 0
        if what == Kind.FORWARD:
            return put_together
        # Accumulated in fp32, both are read and the sum is written.
        into_slot = 12 if num_slices > 1 else self._outline.compute_bytes + grad
        return put_together + parameters * into_slot * num_slices

    def _head(self, op: Op) -> Work:
        trained, tokens = bool(self._outline.trained.head), self._step.tokens
        outline, settings = self._outline, self._settings
        weights = sum(outline.sizes.head)
        forward, backward = outline.head_forward, outline.head_backward
        if not settings.chunked_head:
            return (forward if op.kind == Kind.FORWARD else backward).at(tokens)
        scales = op.kind == Kind.BACKWARD and trained
        if scales:  # of gradients that were made in the forward
            return Work(moved_bytes=8.0 * weights + 2 * self._step.boundary)
        chunks = -(-tokens // settings.head_chunk_tokens)
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
        # A GPU computes while the host enqueues what comes next.
        return seconds + overhead if hardware.on_host else max(seconds, overhead)


def update_bytes(settings: StepSettings, hardware: Hardware) -> float:
    """Host traffic of an update per parameter; where seconds were measured, as many bytes as they are worth."""

    def traffic(moments: str) -> int:
        return settings.grad_bytes + _WEIGHT_TRAFFIC[settings.precision] + 4 * MOMENT_BYTES[moments]

    seconds = hardware.update_seconds.get(settings.precision)
    if seconds is None:
        return float(traffic(settings.moments))
    return seconds * hardware.host_rate * traffic(settings.moments) / traffic("float32")


def rates(hardware: Hardware, computing_threads: int | None = None) -> Rates:
    """Rates of a machine for `schedule.simulate`.

    Args:
        computing_threads: threads that computation takes, where it takes the cores that updates need; None for all cores.
    """
    if not hardware.on_host:
        return Rates(hardware.link_in, hardware.link_out, hardware.host_rate, hardware.link_both)
    computing = computing_threads or hardware.cores
    updating = max(1, hardware.cores - computing)
    share = min(1.0, hardware.cores / (computing + updating))  # threads take turns on too few cores
    known = [bandwidth for threads, bandwidth in hardware.host_bandwidth.items() if int(threads) <= updating]
    alone = max(known, default=hardware.host_rate)
    return Rates(
        hardware.link_in, hardware.link_out, hardware.host_rate, inline=True, computing_beside=share,
        updating_beside=share * alone / hardware.host_rate,
    )  # fmt: skip
