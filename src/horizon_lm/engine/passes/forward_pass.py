"""A forward pass of the model, which owns its state from the first copy to its end or failure."""

import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from horizon_lm.common.units import EMBED, HEAD, Unit, block
from horizon_lm.engine.passes.engine_state import EngineState
from horizon_lm.engine.passes.forward_state import ForwardState, PassOrder, anchor_after
from horizon_lm.engine.passes.micro_batches import (
    BatchParts,
    MicroBatch,
    MicroBatchRandomness,
    RowOutputs,
    split_batches,
)
from horizon_lm.engine.passes.trained_parameters import allocate_grads
from horizon_lm.engine.passes.unit_moves import UnitMoves
from horizon_lm.errors import StreamingError
from horizon_lm.model.attention import Segments
from horizon_lm.model.block_template import comparable
from horizon_lm.schedule import build
from horizon_lm.schedule.ops import Kind, Schedule

_MODAL = re.compile("pixel|image|video|audio|speech|visual|vision|patch|feature")


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of a pass: a call of the model whose tensors are on the device.

    Attributes:
        call: the arguments of the model's own forward method, by name.
        host_ids: the caller's own ``input_ids``; None if they were not on the host, or embeddings were given.
        ids_version: the version of the ``input_ids`` in ``call`` (`version_of`).
        rows, length: shape of the batch, B and T.
        segments: the documents in its rows, if attention needs them.
    """

    call: dict[str, Any]
    host_ids: torch.Tensor | None
    ids_version: int
    rows: int
    length: int
    segments: Segments | None

    @property
    def modal(self) -> list[str]:
        """The names of the arguments with images, video or audio."""
        return [name for name, value in self.call.items() if isinstance(value, torch.Tensor) and _MODAL.search(name)]


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of writes to a tensor, as far as torch counts them."""
    # Tensors of inference mode do not count writes.
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """The properties of a call that determine its forward pass.

    Attributes:
        batches: what the pass computes.
        recording: a backward pass may follow.
        order: the units that it computes.
        may_have_head_grads: the head's gradients may be computed in the forward pass.
        draws: the pass may advance the global random generators.
        caching: there is a cache of keys and values, which holds all rows together: blocks compute whole batches, uncompiled.
        routed: blocks of whose experts only those are streamed that tokens are routed to, unless they are resident.
    """

    batches: Sequence[Batch]
    recording: bool
    order: PassOrder
    may_have_head_grads: bool = False
    draws: bool = False
    caching: bool = False
    routed: frozenset[int] = frozenset()


class ForwardPass:
    """A forward pass. Most of its attributes are set when it begins.

    Attributes:
        state: the state for its backward pass; None if no backward pass can follow.
        trained: full names of the parameters that require a gradient, by unit.
        batches: what the pass computes; most passes have one batch.
        num_rows: rows of each batch (B).
        order: the units that the pass computes.
        embeds: the pass streams rows of the embedding; False if the caller passes ``inputs_embeds``.
        caching: there is a cache of keys and values.
        micro_batches: the parts of the batches that blocks compute at once.
        routed: blocks of whose experts only those are streamed that tokens are routed to.
        randomness: random states of the micro-batches.
        outputs: the structure of the outputs of each computed block, by the number of the batch.
        anchor: the tensor that autograd nodes depend on, besides their inputs.
        borders: the values that `TowerCuts` has read from the device, with the tensor that they are from.
    """

    def __init__(self, engine: EngineState, request: ForwardRequest) -> None:
        self._engine, self._request = engine, request
        self.batches, self.caching = request.batches, request.caching
        self.num_rows = [batch.rows for batch in request.batches]
        self.order = request.order
        self.embeds = EMBED in request.order.units
        self._absent = [u for u in request.order.units if u.is_block and u.block_index in request.order.absent]
        self.state: ForwardState | None = None
        self.trained: dict[Unit, list[str]] = {}
        self.micro_batches: list[MicroBatch] = []
        self.routed: frozenset[int] = frozenset()
        self.randomness = MicroBatchRandomness(engine.device, 1)
        self.outputs: dict[int, dict[int, RowOutputs]] = {}
        self.anchor: torch.Tensor | None = None
        self.borders: dict[Any, tuple[weakref.ref[torch.Tensor], list[int]]] = {}

    def begin(self) -> None:
        """Start the pass: make its tasks. The model's forward method computes the units; the first one issues the copies before it.

        Raises:
            DisagreementError: the ranks are about to run different passes.
        """
        engine, request = self._engine, self._request
        keeps = request.order.differentiated if request.recording else frozenset()
        # Read once: the nodes and the backward pass follow the parameters that are trained now, and none may be frozen in between.
        self.trained = engine.trainable()
        if request.recording:
            self.state = self._record(request.may_have_head_grads)
            self.anchor = self.state.anchor.tensor
        self._drain_if_reshaped(keeps)
        # Experts with slots of their own are never resident.
        layout, tiles = engine.layout, engine.tiles
        self.routed = frozenset(u for u in request.routed if tiles.is_cut(u) or not layout.is_resident(u))
        # After the drain, which may have issued the table's update.
        schedule = self._build_schedule(keeps)
        self.micro_batches = split_batches(self.num_rows, None if self.caching else engine.options)
        # Before the first copy: a rank that is elsewhere must get an error here, and not join another pass's collectives.
        num_before, num_everywhere = _require_same_pass(engine, schedule, len(self.micro_batches))
        self.randomness = MicroBatchRandomness(
            engine.device, len(self.micro_batches), request.draws, num_before, num_everywhere
        )
        engine.cursor.start(schedule, UnitMoves(engine, routed=frozenset(map(block, self.routed))))

    def _build_schedule(self, keeps: frozenset[int]) -> Schedule:
        """Return the operations of the pass. ``keeps`` are the blocks that keep their boundaries for a backward pass."""
        engine, between, request = self._engine, self._engine.between, self._request
        return build.forward(
            engine.layout,
            order=request.order.units,
            keeps=keeps,
            changed=between.outer_version != engine.store.version,
            blocks_changed=any(
                between.resident_versions.get(u) != engine.store.block_version for u in self._resident_blocks()
            ),
            table_update=engine.updates.table is not None,
            head_grads=request.may_have_head_grads and bool(self.trained[engine.slab_unit(HEAD)]),
            routed=self.routed,
        )

    def _resident_blocks(self) -> list[int]:
        """Return the blocks of the pass whose weights are resident."""
        first = self._engine.parts.num_blocks - self._engine.residency.weights
        return [unit.block_index for unit in self.order.units if unit.is_block and unit.block_index >= first]

    def place(self, unit: Unit) -> int:
        """Return the place of a unit in the order of the pass."""
        return self._places[unit]

    @cached_property
    def _places(self) -> dict[Unit, int]:
        """The place of each unit in the order of the pass."""
        return {unit: place for place, unit in enumerate(self.order.units)}

    def cut(self, index: int, batches: Sequence[int]) -> BatchParts:
        """Return the micro-batches in which a block computes these batches. A tower computes each batch at once, unless `TowerCuts` cuts it."""
        rows = [self.num_rows[batch] for batch in batches]
        if index in self._engine.parts.decoder_blocks:
            segments = [batch.segments for batch in self.batches]
            return BatchParts(batches, rows, self.micro_batches, range(len(self.micro_batches)), segments, sum(rows))
        of_batches = [part.batch for part in self.micro_batches]
        parts = [MicroBatch(number, 0, count, True) for number, count in enumerate(rows)]
        streams = [of_batches.index(batch) for batch in batches]
        return BatchParts(batches, rows, parts, streams, [None] * len(rows), sum(rows))

    def absent_before(self, unit: Unit) -> list[int]:
        """Return the absent blocks that come before a unit, once."""
        passed = [each for each in self._absent if self.place(each) < self.place(unit)]
        self._absent = self._absent[len(passed) :]
        return [each.block_index for each in passed]

    def note_outputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let the nodes that follow a unit with these outputs be differentiated before it. Nodes of a single batch are so anyway, because
        autograd visits nodes of one thread in the reverse of their order.
        """
        if len(self.batches) > 1 and self.anchor is not None:
            self.anchor = anchor_after(self.anchor, tensors)

    def end(self) -> None:
        """End the pass, whose units are computed."""
        engine, between = self._engine, self._engine.between
        # The update of those rows of the embedding that this pass has not read; it may go on after the pass.
        engine.updates.add(engine.cursor.tasks_of(Kind.UPDATE))
        engine.cursor.finish()
        self.randomness.finish()
        # Only now, because a pass that fails may not have streamed them in.
        between.outer_version = engine.store.version
        between.resident_versions |= dict.fromkeys(self._resident_blocks(), engine.store.block_version)
        # All of the embedding's update was issued in this pass, so its part of a checkpoint can follow.
        engine.updates.table = None
        engine.saves.issue_table()

    def _record(self, has_head_grads: bool) -> ForwardState:
        """Make the state of a pass that a backward pass may follow. Allocate host gradients, and take the room for graphs if it is free."""
        engine, between = self._engine, self._engine.between
        # At the first pass that records, when it is known which parameters are trained.
        allocate_grads(engine)
        anchor = between.anchor_of([engine.refs[name].param for names in self.trained.values() for name in names])
        state = ForwardState(engine.store.version, self.order, self.trained, config_of(engine), anchor)
        # Held weakly, so that the state and its buffers are freed with a loss that is dropped without a backward pass.
        between.recorded.add(state)
        state.has_head_grads = has_head_grads
        # There is room for the graphs of one forward pass; another forward pass before its backward pass recomputes all blocks.
        if between.graphs_lease.holder is None:
            state.graphs = frozenset(
                index
                for index in state.keeps
                if engine.residency.keeps_graph(index, engine.parts.num_blocks) and not engine.tiles.is_cut(index)
            )
            between.graphs_lease.take(state)
        return state

    def _drain_if_reshaped(self, keeps: frozenset[int]) -> None:
        """Drain if this pass is recorded and has another structure (kept blocks of the decoder, residency, trained parameters) than the last
        recorded one, which rarely happens.

        The waits across passes are proven to suffice for recorded passes of one structure, with any unrecorded passes in between, whichever
        towers they compute.
        """
        engine = self._engine
        kept = keeps.intersection(engine.parts.decoder_blocks)
        structure = (kept, engine.residency, [name for names in self.trained.values() for name in names])
        if self._request.recording and structure != engine.between.structure:
            engine.drain()
            engine.between.structure = structure


def require_forward(engine: EngineState, name: str) -> None:
    """Raise StreamingError if a part of the model is called while no pass runs, neither a forward pass nor a backward pass."""
    if not engine.cursor.active:
        raise StreamingError(
            f"{name} of a streamed model cannot be called on its own: its weights are on the device only while "
            "the whole model runs. Call model(...); with output_hidden_states=True it also returns the hidden states."
            f"{advice_on_replaced_forward(engine)}"
        )


def advice_on_replaced_forward(engine: EngineState) -> str:
    """Return advice, as the end of a message, for a model whose forward method other code has replaced; empty for others."""
    forward = vars(engine.parts.model).get("forward")
    if forward is None or forward.__module__.startswith("horizon_lm."):
        return ""
    return (
        " The model's forward method was replaced after it was streamed, as trainers of TRL do; create them with "
        "horizon_lm.trainer(SFTTrainer)(...)."
    )


def config_of(engine: EngineState) -> Any:
    """Return the model's config as comparable values."""
    config = dict(vars(engine.parts.model.config.get_text_config()))
    # A classifier sets this in its first forward pass with labels; no block reads it.
    config.pop("problem_type", None)
    return comparable(config)


def _require_same_pass(engine: EngineState, schedule: Schedule, num_micro_batches: int) -> tuple[int, int | None]:
    """Require that all ranks run the same pass. Return how many micro-batches the ranks before this one have, and how many all ranks have;
    0 and None for a single rank.

    Raises:
        DisagreementError: the ranks are about to run different passes.
    """
    if engine.mesh.size == 1:
        return 0, None
    gradients = "with gradients" if schedule.keeps else "without gradients"
    size = engine.options.expert_tile  # tiles of other sizes may be as many
    tiles = "" if size is None else f", experts in tiles of {size}"
    engine.mesh.require_same("the start of a pass", f"{schedule.digest} {gradients}{tiles}")
    counts = engine.mesh.exchange("its micro-batches", num_micro_batches)
    return sum(counts[: engine.mesh.rank]), sum(counts)
