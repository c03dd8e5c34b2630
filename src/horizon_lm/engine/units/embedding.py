"""The input embedding: the distinct rows of a batch are gathered on the host, and only these are copied to the device.

Their gradients are summed per row on the device, and only these rows are landed. Otherwise a vocabulary of 150,000 rows
would be the largest copy of a step, with a gradient of mostly zeros.

Shapes: B batch rows, T tokens of a row, R distinct rows of the table that a pass reads, H hidden size, V vocabulary. Most passes
have one batch; the rows of several are gathered once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from horizon_lm.common.units import EMBED, HEAD
from horizon_lm.device.base import send
from horizon_lm.device.transfers import GatherRows, Land, LandRows, Move
from horizon_lm.distributed.collectives import Gather, Reduce
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.forward_pass import advice_on_replaced_forward, version_of
from horizon_lm.engine.passes.forward_state import ForwardState
from horizon_lm.engine.passes.lockstep import batched_call
from horizon_lm.engine.units.absent import compute_absent
from horizon_lm.engine.units.block_computation import BlockComputation
from horizon_lm.engine.units.node import UnitNode
from horizon_lm.errors import ModelNotSupportedError, StreamingError, TokenError
from horizon_lm.model.functional import is_linear, look_up
from horizon_lm.schedule.ops import Kind


class StreamedEmbedding:
    """A table of the input embedding. A model has several if PEFT trains a copy of its embedding; a pass reads one of them.

    Args:
        engine: the engine of the model.
        module: the module with the table.
        blocks: the blocks of the model.
    """

    def __init__(self, engine: Engine, module: nn.Module, blocks: BlockComputation) -> None:
        self.engine, self.module, self._blocks = engine, module, blocks
        self.is_linear = is_linear(module)
        self._name = next(name for name, ref in engine.refs.items() if (module, "weight") in ref.places)
        self._unit = engine.store.unit_of[self._name]
        self.width = engine.store.weight(self._name).shape[1]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the hidden states (B, T, H) of ids (B, T). The model calls this instead of the embedding's forward
        method.
        """
        engine = self.engine
        if engine.running.forward is None:
            return self._look_up_outside(ids)
        if not engine.forward.embeds:  # tokens whose rows the model compares with the embeddings of its caller
            return self._look_up_on_host(ids)
        hidden: torch.Tensor = batched_call("embedding", ids, self._forward_all, place=engine.forward.place(EMBED))
        return hidden

    def _forward_all(self, batches: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the hidden states (B, T, H) of each batch of ids (B, T) of the pass."""
        engine, table = self.engine, self._table()
        compute_absent(self._blocks, EMBED)
        on_host = [self._on_host(ids) for ids in batches]
        rows, flat = self._distinct_rows(on_host)
        room = self._max_rows(flat.numel(), table.shape[0])
        buffer = engine.memory.table_rows.get(
            rows.numel() * table.shape[1], engine.options.compute_dtype, room=room * table.shape[1]
        )
        received = buffer.view(rows.numel(), table.shape[1])  # (R, H)
        self._bind_copies(rows, received)
        parts = zip(flat.split([ids.numel() for ids in on_host]), batches, strict=True)
        positions = [send(part.view(ids.shape), engine.device.torch_device) for part, ids in parts]
        lookup = _Lookup(self, rows, positions, engine.recording, room)
        if engine.recording is not None and self._is_trained():
            hidden = lookup.compute(received)
            engine.forward.note_outputs(hidden)
            return hidden
        return lookup.forward([received], needs_grad=[False])

    def _distinct_rows(self, batches: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the distinct rows (R,) that any rank reads, sorted, and the position among them of each id of this rank, for all
        batches in one dimension. All ranks call this.
        """
        rows, positions = torch.unique(torch.cat([ids.reshape(-1) for ids in batches]), return_inverse=True)
        self._require_rows(rows)
        union = self.engine.mesh.union(rows)  # sorted, too
        return union, torch.searchsorted(union, rows)[positions]

    def _bind_copies(self, rows: torch.Tensor, received: torch.Tensor) -> None:
        """Bind the update of rows (R,) by the last step, their copy into a buffer (R, H), and its exchange with other ranks.

        The cursor issues them in the schedule's order when the lookup begins to compute.
        """
        engine, own = self.engine, self._own_part(rows)
        # The last step's update of these rows must finish before they are read; the rest of the table may follow later.
        if engine.updates.table is not None:
            # A pass that reads another of the tables needs none of the trained table's rows.
            updated = rows[own] if self._unit == EMBED else rows[:0]
            engine.cursor.bind(Kind.UPDATE_ROWS, EMBED, engine.updates.table.rows(updated))
        engine.cursor.bind(Kind.STREAM_IN, EMBED, [GatherRows(received[own], self._table(), rows[own])])
        if engine.mesh.size > 1:
            engine.cursor.bind(Kind.GATHER, EMBED, [Gather(engine.mesh.gather, received, self._cuts(rows))])

    def _max_rows(self, tokens: int, vocabulary: int) -> int:
        """Return the most distinct rows that all ranks together can read in a pass with this many tokens on each rank, or, if the pass is
        recorded, with the tokens of the largest expected batch, if that has more.

        Buffers are allocated for this number of rows, so that no later batch with more distinct ids replaces them.
        """
        expected = self.engine.expected
        most = max(tokens, expected.tokens if self.engine.recording is not None else 0)
        return expected.table_rows(most * self.engine.mesh.size, vocabulary)

    def _require_rows(self, rows: torch.Tensor) -> None:
        """Raise TokenError if sorted rows (R,) are not all in the table, before a kernel accesses memory out of bounds."""
        count = self._table().shape[0]
        if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < count:
            wrong = int(rows[0]) if rows[0] < 0 else int(rows[-1])
            raise TokenError(
                f"input_ids contains {wrong}, but the input embedding has {count} rows; use the model's own tokenizer"
            )

    def _look_up_outside(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up ids outside of the model's forward pass. The result rejects a gradient, unless it is detached."""
        with torch.no_grad():
            hidden = self._look_up_on_host(ids)
        if not (torch.is_grad_enabled() and self.engine.refs[self._name].param.requires_grad):
            return hidden
        hidden.requires_grad_().register_hook(self._reject_gradient_outside)
        return hidden.clone()  # which may be changed in place, as a leaf of autograd's graph may not

    def _reject_gradient_outside(self, grad: torch.Tensor) -> None:
        """Raise StreamingError for a gradient of rows that were looked up outside of the model; a hook of a tensor."""
        raise StreamingError(
            "the input embedding of a streamed model has no gradient when it is called outside of the model: give "
            "input_ids to the model, or detach() what the embedding returns, or freeze it."
            f"{advice_on_replaced_forward(self.engine)}"
        )

    def _look_up_on_host(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up ids of any shape in host memory. Their gradient must be zero."""
        rows, positions = torch.unique(ids.cpu(), return_inverse=True)  # (R,), and the shape of the ids
        self._require_rows(rows)
        return look_up(self.module, self.read(rows), positions.to(self.engine.device.torch_device), None)

    def read(self, index: Any) -> torch.Tensor:
        """Return rows of the table that the model reads directly, outside of a lookup. Their gradient must be zero."""
        engine = self.engine
        engine.access.hand_out_weight()  # waits for the table's update, since these rows are read past the schedule and its waits
        # A copy even on the CPU, where a slice would be a view of the weights that code could write to or mark as a
        # leaf.
        rows = self._table()[index].to(engine.device.torch_device, engine.options.compute_dtype, copy=True)
        # Only a lookup lands gradients, so if the backward pass of this pass trains the table, a gradient of these rows is an error.
        if engine.recording is not None and self._is_trained():
            rows.requires_grad_().register_hook(_reject_gradient)
        return rows

    def _on_host(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids on the host: the caller's own tensor, if ``ids`` is its unchanged copy on the device, because the host would wait for
        a copy from there.
        """
        # Most models pass the ids on as they are, or as another view of the same memory.
        for batch in self.engine.forward.batches:
            if batch.host_ids is None:
                continue
            given = batch.call["input_ids"]
            # An unchanged version means that the model has not written to them in place since they were sent.
            same_place = given.data_ptr() == ids.data_ptr() and given.stride() == ids.stride()
            if same_place and given.shape == ids.shape and version_of(ids) == batch.ids_version:
                return batch.host_ids
        return ids.to("cpu")

    def _table(self) -> torch.Tensor:
        """Return the table (V, H) in host memory."""
        slab = self.engine.store.slab_of(self._name)
        return slab.layout.view(slab.weights, self._name)

    def _own_part(self, rows: torch.Tensor) -> slice:
        """Return the range, among sorted rows (R,), of the rows that this rank owns."""
        shard = self.engine.store.shard
        return slice(0, rows.numel()) if shard.is_whole else shard.own(self._cuts(rows))

    def _cuts(self, rows: torch.Tensor) -> list[int]:
        """Return the places at which sorted rows (R,) are cut between the ranks."""
        return self.engine.store.units[EMBED].plain.row_cuts(rows)

    def _is_trained(self) -> bool:
        """Return whether the running pass trains this table: of several, only that in the slab of EMBED can be trained."""
        return self._unit == EMBED and bool(self.engine.trained_names(EMBED))

    def landing_move(self, rows: torch.Tensor, outgoing: torch.Tensor, room: int) -> Move:
        """Return the move that lands the gradients of distinct rows, in the table's gradient or in a buffer of landed rows.

        Side effects: unless they are added to a gradient, the sum of squares begins anew; for a buffer, the host waits for running updates.

        Args:
            rows: the rows, shape (R,).
            outgoing: their gradients on the device, shape (R, H).
            room: rows for which a new buffer has room.
        """
        engine, norms = self.engine, self.engine.grads.squared_norms
        slab = engine.store.slab_of(self._name)
        if engine.grads.slots is not None and not engine.grads.slots.keeps_slab(EMBED):
            norms.begin(slab)
            engine.updates.finish()  # the last update of the table reads the slot that is written now
            slot = engine.grads.slots.slot_of_rows(rows, room)
            return Land(slot.view(-1), outgoing.view(-1), norms.reporter_of(slab), add=False)
        # The gradient of a tied head lands in the same slab earlier in this pass; not yet published, it counts as empty.
        is_empty = engine.grads.is_empty(self._name) and not (engine.parts.tied and HEAD in engine.backward.ready)
        if is_empty:
            norms.begin(slab)
        clear, report = engine.grads.take_rows_to_clear(rows, is_empty), norms.reporter_of(slab)
        return LandRows(engine.store.grad(self._name), outgoing, rows, clear=clear, add=not is_empty, report=report)


def _reject_gradient(grad: torch.Tensor) -> None:
    """Raise StreamingError for a gradient that is not zero; a hook of a tensor."""
    if grad.any():
        raise StreamingError(
            "the model reads rows of its input embedding outside of a lookup, and these rows received a gradient, "
            "which a streamed model cannot keep; freeze the embedding (requires_grad_(False))"
        )


class _Lookup(UnitNode):
    """A lookup in the embedding, in one forward pass.

    Args:
        embedding: the streamed embedding.
        rows: distinct rows of the table, shape (R,).
        positions: for each batch, the index of each token's row among them, shape (B, T).
        forward_state: the state of the forward pass; None if no backward pass can follow.
        room: maximum number of rows in the buffers.
    """

    def __init__(
        self,
        embedding: StreamedEmbedding,
        rows: torch.Tensor,
        positions: Sequence[torch.Tensor],
        forward_state: ForwardState | None,
        room: int,
    ) -> None:
        super().__init__(embedding.engine, forward_state)
        self.embedding, self.rows, self.positions, self.room = embedding, rows, positions, room
        padding: int | None = getattr(embedding.module, "padding_idx", None)
        found = (rows == padding).nonzero() if padding is not None else rows.new_empty(0)
        self._padding_position = int(found[0]) if len(found) else None  # the place of the padding row among the rows
        self._row_values: torch.Tensor | None = None  # a copy of the rows, if the gradient depends on their values

    def look_up(self, weight: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run the model's embedding module on these rows (R, H) and the positions (B, T) of tokens among them."""
        return look_up(self.embedding.module, weight, positions, self._padding_position)

    def forward(self, inputs: Sequence[torch.Tensor], needs_grad: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        """Return the hidden states (B, T, H) of each batch from the rows (R, H) on the device."""
        engine, (received,) = self.engine, inputs
        if engine.cursor.is_past(Kind.FORWARD, EMBED):
            raise ModelNotSupportedError(
                "the model looks tokens up twice in a forward pass, as some do for images; a streamed embedding answers one lookup"
            )
        with engine.cursor.compute(Kind.FORWARD, EMBED), torch.no_grad():
            hidden = tuple(self.look_up(received, positions) for positions in self.positions)
            # The next batch overwrites the buffer, so rows that the backward pass needs are copied.
            if self.forward_state is not None and not self.embedding.is_linear:
                self._row_values = received.clone()
            engine.device.poison(received)
        return hidden

    def backward(
        self, grads: Sequence[torch.Tensor | None], kept: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Sum the gradients (B, T, H) of hidden states into one gradient per row (R, H), which is landed."""
        embedding, engine = self.embedding, self.engine
        num_rows, width = self.rows.numel(), embedding.width
        buffer = engine.memory.table_row_grads.get(
            num_rows * width, engine.store.precision.grad_dtype, room=self.room * width
        )
        outgoing = buffer.view(num_rows, width)  # (R, H)
        self._bind_landing(outgoing)  # before the computation, at whose end the cursor issues it
        with engine.cursor.compute(Kind.BACKWARD, EMBED):
            weight = self._take_leaf()
            outgoing.zero_()
            for positions, grad in zip(self.positions, grads, strict=True):
                if grad is not None:
                    with torch.enable_grad():
                        (row_grads,) = torch.autograd.grad(self.look_up(weight, positions), weight, grad)
                    outgoing.add_(row_grads)
            has_gradient = any(grad is not None for grad in grads)
            engine.backward.note_written(EMBED, [embedding._name] if has_gradient else [])
        return [None]

    def _bind_landing(self, outgoing: torch.Tensor) -> None:
        """Bind the landing of gradients (R, H), of which each rank lands the rows that it owns, and before it their sum over ranks."""
        embedding, engine = self.embedding, self.engine
        own = embedding._own_part(self.rows)
        if engine.mesh.size > 1:
            engine.cursor.bind(Kind.REDUCE, EMBED, [Reduce(engine.mesh.reduce, outgoing, embedding._cuts(self.rows))])
        engine.cursor.bind(Kind.STREAM_OUT, EMBED, [embedding.landing_move(self.rows[own], outgoing[own], self.room)])

    def _take_leaf(self) -> torch.Tensor:
        """Return the rows (R, H) as a leaf that requires a gradient, and forget them."""
        if self.embedding.is_linear:  # the gradient does not depend on the values, so one zero represents all of them
            options, device = self.engine.options, self.engine.device.torch_device
            zero = torch.zeros((), dtype=options.compute_dtype, device=device)
            return zero.expand(self.rows.numel(), self.embedding.width).requires_grad_()
        assert self._row_values is not None
        leaf, self._row_values = self._row_values, None
        return leaf.requires_grad_()
