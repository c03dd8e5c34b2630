"""A training step as run by the engine: its settings and its passes."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from horizon_lm.common.streaming_options import chosen
from horizon_lm.common.units import EMBED, HEAD, OUTER, Unit, block
from horizon_lm.memory.layout.buffers import BufferOptions, BufferSettings, BufferTable
from horizon_lm.memory.layout.model import TiledLayout
from horizon_lm.memory.layout.parts import PartLayout
from horizon_lm.memory.layout.units import StorageLayout
from horizon_lm.planning.arithmetic.outline import Footprint, HeadCosts, ModelOutline
from horizon_lm.planning.arithmetic.request import Request
from horizon_lm.planning.arithmetic.residency import Residency
from horizon_lm.schedule import between, build
from horizon_lm.schedule.ops import Schedule


@dataclass(frozen=True, kw_only=True)
class StepSettings(Request):
    """A request whose open settings are chosen.

    Attributes:
        head_chunk_tokens: tokens of a chunk of logits.
        expert_tile: number of experts in a tile; None for whole blocks.
    """

    head_chunk_tokens: int = chosen(64)
    activation_checkpoints: int = chosen(0)
    resident_blocks: int = chosen(0)
    resident_graphs: int = chosen(0)
    expert_tile: int | None = chosen(None)

    @property
    def residency(self) -> Residency:
        """The data that stays on the device."""
        return Residency.of(self)

    @property
    def grad_slots(self) -> tuple[bool, int]:
        """Return whether an accumulator sums gradients, and the bytes of an element of their slots: see `Shard.grad_slots`."""
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
    def head(self) -> HeadCosts:
        """The costs of norm, head and loss."""
        is_compiled = self.settings.chunked_head and self.settings.compiled
        return self.outline.heads["compiled" if is_compiled else self.settings.head]

    @property
    def tokens(self) -> int:
        return self.settings.rows * self.outline.length

    @property
    def counted_tokens(self) -> float:
        """Tokens of all ranks in a typical step, without padding."""
        return (self.settings.tokens_per_step or self.tokens) * self.settings.num_ranks

    @property
    def table_rows(self) -> int:
        """Upper bound on the number of distinct table rows that the step reads."""
        return self._distinct_rows(self.tokens * self.settings.num_ranks)

    def _distinct_rows(self, tokens: int) -> int:
        vocabulary = self.outline.layout.vocabulary
        return min(tokens, vocabulary, self.settings.distinct_tokens or vocabulary)

    @property
    def hidden(self) -> int:
        """Bytes of one block's input for the whole batch (B, T, H)."""
        return self.tokens * self.outline.layout.hidden * self.outline.compute_bytes

    def hidden_of(self, index: int) -> int:
        """Return the bytes of a block's input for the whole batch; 0 for a block of a tower that is not computed."""
        if not self.is_of_tower(index):
            return self.hidden
        hidden = self.outline.kind(index).hidden
        return 0 if hidden is None else hidden.at(self.settings.rows)

    def boundary_of(self, index: int) -> int:
        """Return the bytes that a block keeps for the backward pass: its input and, with tiles, as many of what its experts return."""
        return self.hidden_of(index) * (1 if self.is_of_tower(index) else self.tiled.kept_each)

    @property
    def image_bytes(self) -> int:
        """Bytes that the code around the blocks of towers keeps throughout the step, pixels among them."""
        images = self.outline.images
        return 0 if images is None else images.held.at(self.settings.rows)

    def is_of_tower(self, index: int) -> bool:
        """Return whether a block is one of a tower."""
        return index < self.outline.layout.num_tower_blocks

    def slices_of(self, index: int) -> list[int]:
        """Return the numbers of rows that a block computes at once, largest first. For a tower, assume the images of all rows at once, which
        is the most: the engine may cut them.
        """
        return [self.settings.rows] if self.is_of_tower(index) else self.settings.slices

    def footprints_of(self, index: int) -> list[Footprint]:
        """Return the footprint of a block for each of its micro-batches."""
        kind = self.outline.kind(index)
        return [kind.footprint_with(rows, self.settings.expert_tile) for rows in self.slices_of(index)]

    @property
    def offloaded(self) -> int:
        """Number of first blocks with their boundary in host memory, as in the schedule."""
        return self.outline.num_blocks - self.settings.residency.boundaries

    @property
    def waiting(self) -> list[int]:
        """The blocks with their boundary in host memory. Blocks without a gradient keep none."""
        return [index for index in self.outline.differentiated if index < self.offloaded]

    @property
    def staying(self) -> list[int]:
        """The blocks with their boundary on the device."""
        return [index for index in self.outline.differentiated if index >= self.offloaded]

    @property
    def moments(self) -> list[frozenset[str]]:
        """For each moment of the optimizer, the full names of the trained parameters that have it."""
        layout = self.outline.layout
        return self.settings.optimizer.moments_of(layout.trained, layout.matrices)

    @property
    def tiled(self) -> TiledLayout[PartLayout[StorageLayout]]:
        """The parts of the model that have slots, as they are laid out for this rank."""
        return self.outline.layout.on(self.settings.shard).tiled(self.settings.expert_tile)

    @property
    def buffer_options(self) -> BufferOptions:
        """The settings that determine the sizes of slots."""
        settings = self.settings
        return BufferOptions(
            compute_dtype=_DTYPE[self.outline.compute_bytes], grad_dtype=_DTYPE[settings.grad_bytes],
            in_micro_batches=settings.in_micro_batches, chunked_head=settings.chunked_head,
        )  # fmt: skip

    @property
    def buffer_table(self) -> BufferTable:
        """The slots of the engine."""
        return _buffer_table_of(self.tiled, self.buffer_options)

    def buffer_settings(self) -> BufferSettings:
        """Return the settings that determine the engine's device buffers."""
        settings = self.settings
        return BufferSettings(
            options=self.buffer_options, tokens=self.tokens, offloaded=len(self.waiting), resident=settings.residency.weights,
            largest_boundary=max(map(self.boundary_of, self.waiting), default=0),
            table_rows=self.table_rows,
            forward_table_rows=max(
                (self._distinct_rows(each.rows * each.length * settings.num_ranks) for each in settings.forwards), default=0
            ),
        )  # fmt: skip

    @property
    def layout(self) -> build.Layout:
        """The properties of the step that shape its schedule."""
        settings = self.settings
        accumulates, _slot_bytes = settings.grad_slots
        return build.Layout(
            num_blocks=self.outline.num_blocks, tied=self.outline.layout.tied, offloaded=self.offloaded,
            resident=settings.residency.weights, accumulates=accumulates, update_in_backward=settings.update_in_backward,
            adapters=self.outline.has_adapters, sharded=settings.num_ranks > 1, packed=self.buffer_table.gathers_packed, tiles=self.tiled.counts,
        )  # fmt: skip

    def passes(self) -> list[Schedule]:
        """Return the forward, backward and update passes of one step among many."""
        settings, model, layout = self.settings, self.outline.layout, self.layout
        order, differentiated = self.outline.order, self.outline.differentiated
        units = [OUTER, *map(block, range(layout.num_blocks)), HEAD]
        is_trained = {unit: model.trained_numel(unit) > 0 for unit in (EMBED, *units)}
        # The next forward pass updates the table, which includes a tied head.
        updated = [u for u in units if is_trained[u] and not (u == HEAD and model.tied)]
        head_grads = settings.chunked_head and is_trained[HEAD]
        forward = build.forward(
            layout,
            order=order,
            keeps=differentiated,
            blocks_changed=any(is_trained[block(u)] for u in range(layout.num_blocks)),
            table_update=is_trained[EMBED],
            head_grads=head_grads,
        )
        backward = build.backward(
            layout,
            order=[unit for unit in order if unit == EMBED or unit.block_index in differentiated],
            trainable=[u for u in (EMBED, *units) if is_trained[u]],
            head_grads=head_grads,
        )
        if settings.update_in_backward:
            return [forward, backward]
        return [forward, backward, between.update(layout, updated, self.orthogonalized)]

    @property
    def orthogonalized(self) -> list[Unit]:
        """The blocks whose update is orthogonalized on the device."""
        blocks = self.outline.layout.blocks if self.settings.optimizer.orthogonalizes else ()
        return [unit for unit in blocks if self.outline.layout.matrices_of(unit)]

    def passes_with_save(self) -> list[Schedule]:
        """Return the passes of a step, and those that write the checkpoint which is begun before it."""
        forward, *others = self.passes()
        if not self.outline.layout.trained_numel(EMBED):
            return [between.save(self.layout, self.saved_units), forward, *others]
        # The table is saved once its last update is over, which runs in the forward pass.
        save = between.save(self.layout, [unit for unit in self.saved_units if unit != EMBED])
        return [save, forward, between.save_table(self.layout), *others]

    @property
    def saved_units(self) -> list[Unit]:
        """The units of a checkpoint: all that have slabs, or only the trained ones if the base of adapters is frozen."""
        layout = self.outline.layout
        numel = layout.trained_numel if self.outline.base_is_frozen else layout.numel
        return [unit for unit in (EMBED, *layout.blocks, *([] if layout.tied else [HEAD]), OUTER) if numel(unit)]


_DTYPE = {2: "bfloat16", 4: "float32"}  # by the bytes of an element


@lru_cache(256)  # a plan tries many settings of the same few layouts
def _buffer_table_of(tiled: TiledLayout[PartLayout[StorageLayout]], options: BufferOptions) -> BufferTable:
    """Return the slots of the engine, the same object for equal arguments."""
    return BufferTable(tiled, options)
