"""The embedding table: rows are gathered on the host, and only they travel."""

from typing import Any

import torch

from horizon_lm.device.base import send
from horizon_lm.device.transfers import GatherRows, Land, LandRows, Move
from horizon_lm.engine.executor import Engine
from horizon_lm.engine.forward_state import ForwardState
from horizon_lm.errors import StreamingError, TokenError
from horizon_lm.model.functional import is_linear, look_up
from horizon_lm.schedule.ops import EMBED, HEAD, Kind


class StreamedEmbedding:
    """Streams the input embedding of a model."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.module = engine.parts.embed
        self.is_linear = is_linear(self.module)
        (self._name,) = engine.store.units[EMBED].layout
        self.width = engine.store.weight(self._name).shape[1]
        self.probe_rows: int | None = None  # answer a probe with zeros for so many rows
        self._known: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up ids (B, T), in the place of the embedding module's forward. Returns hidden states (B, T, H)."""
        engine = self.engine
        if not engine.cursor.active:
            return self._alone(ids)
        table = self._table(engine.store.units[EMBED].weights)
        if self.probe_rows is not None:
            return torch.zeros(
                (*ids.shape, table.shape[1]), dtype=engine.options.compute_dtype, device=engine.device.torch_device
            )
        rows, positions = torch.unique(self._on_host(ids), return_inverse=True)
        self._require_rows(rows)
        room = self._room(ids.numel(), table.shape[0])
        buffer = engine.memory.table_rows.get(
            rows.numel() * table.shape[1], engine.options.compute_dtype, room=room * table.shape[1]
        )
        received = buffer.view(rows.numel(), table.shape[1])
        if engine.updates.table is not None:
            engine.cursor.bind(Kind.UPDATE_ROWS, EMBED, engine.updates.table.rows(rows))
        engine.cursor.bind(Kind.STREAM_IN, EMBED, [GatherRows(received, table, rows)])
        use = _Use(self, rows, send(positions, engine.device.torch_device), engine.recording, room)
        if engine.recording is not None and engine.trained(EMBED):
            return _TableFunction.apply(use, received, engine.anchor)
        return use.forward(received)

    def _room(self, tokens: int, vocabulary: int) -> int:
        """Distinct rows that a batch of so many tokens can read, or the largest that is expected, if this one is trained on.

        A buffer for fewer would have to be replaced at the first batch with more distinct ids.
        """
        expected = self.engine.expected
        return expected.table_rows(max(tokens, expected.tokens if self.engine.recording is not None else 0), vocabulary)

    def _require_rows(self, rows: torch.Tensor) -> None:
        """TokenError for ids that the table has no row for: a kernel that writes there would leave a partially updated model."""
        count = self._table(self.engine.store.units[EMBED].weights).shape[0]
        if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < count:
            wrong = int(rows[0]) if rows[0] < 0 else int(rows[-1])
            raise TokenError(
                f"input_ids has {wrong}, but the input embedding has {count} rows; take the model's own tokenizer"
            )

    def _alone(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up ids outside a forward of the model, in host memory. StreamingError if a gradient is wanted."""
        engine = self.engine
        param = engine.refs[self._name].param
        if torch.is_grad_enabled() and param.requires_grad:
            raise StreamingError(
                "the input embedding of a streamed model has no gradient when it is called by itself: give input_ids to the "
                "model, or call the embedding under torch.no_grad(), or freeze it"
            )
        engine.hand_out_weight()
        with torch.no_grad():
            rows, positions = torch.unique(ids.cpu(), return_inverse=True)
            self._require_rows(rows)
            device = engine.device.torch_device
            received = self._table(engine.store.units[EMBED].weights)[rows].to(device, engine.options.compute_dtype)
            return look_up(self.module, received, positions.to(device), None)

    def read(self, index: Any) -> torch.Tensor:
        """Return some rows as the model's code asks for them besides its lookup; their gradient must be zero."""
        engine = self.engine
        engine.hand_out_weight()
        rows = self._table(engine.store.units[EMBED].weights)[index].to(
            engine.device.torch_device, engine.options.compute_dtype, copy=True
        )
        if engine.recording is not None and engine.trained(EMBED):
            rows.requires_grad_().register_hook(_reject_gradient)
        return rows

    def expect(self, ids: torch.Tensor | None, on_host: torch.Tensor | None) -> None:
        """The coming forward's ids, and the same ones where the caller had them: fetching them would wait for the device."""
        known = ids is not None and on_host is not None and on_host.device.type == "cpu"
        self._known = (ids, _version(ids), on_host) if known else None  # type: ignore[arg-type, assignment]

    def _on_host(self, ids: torch.Tensor) -> torch.Tensor:
        if self._known is not None:
            given, version, on_host = self._known
            same_place = given.data_ptr() == ids.data_ptr() and given.stride() == ids.stride()
            if same_place and given.shape == ids.shape and _version(ids) == version:
                return on_host
        return ids.to("cpu")

    def _table(self, slab: torch.Tensor) -> torch.Tensor:
        return self.engine.store.units[EMBED].layout.view(slab, self._name)

    def landing(self, rows: torch.Tensor, outgoing: torch.Tensor, room: int) -> Move:
        """Gradients of distinct rows (R, H) on their way to host memory; ``room``: for so many at most."""
        engine = self.engine
        if engine.grads.slots is not None and not engine.grads.slots.keeps(EMBED):
            report = engine.grads.squared_norms.landing(EMBED, whole=True)
            engine.updates.finish()  # the last one of the table reads the slot
            return Land(engine.grads.slots.rows(rows, room).view(-1), outgoing.view(-1), False, report)
        # A tied head's gradient has landed on the same table earlier in this pass.
        empty = engine.grads.is_empty(self._name) and not (engine.parts.tied and engine.has_landed(HEAD))
        report = engine.grads.squared_norms.landing(EMBED, whole=empty)
        clear = engine.grads.rows_to_clear(rows, empty)
        return LandRows(engine.store.grad(self._name), outgoing, rows, clear=clear, add=not empty, report=report)


def _reject_gradient(grad: torch.Tensor) -> None:
    if grad.any():
        raise StreamingError(
            "the model reads rows of its input embedding besides the lookup, and they have a gradient, which a streamed model "
            "does not keep; freeze the embedding (requires_grad_(False))"
        )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Use:
    """One lookup: which rows, where each token's row is among them, and for how many rows buffers are made."""

    def __init__(
        self,
        table: StreamedEmbedding,
        rows: torch.Tensor,
        positions: torch.Tensor,
        forward_state: ForwardState | None,
        room: int,
    ) -> None:
        self.table, self.rows, self.positions, self.forward_state, self.room = (
            table,
            rows,
            positions,
            forward_state,
            room,
        )
        padding: int | None = getattr(table.module, "padding_idx", None)
        found = (rows == padding).nonzero() if padding is not None else rows.new_empty(0)
        self._padding_position = int(found[0]) if len(found) else None
        self._weight: torch.Tensor | None = None  # the rows, where the gradient depends on them

    def look_up(self, weight: torch.Tensor) -> torch.Tensor:
        """Run the model's own embedding module over these rows (R, H)."""
        return look_up(self.table.module, weight, self.positions, self._padding_position)

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        engine = self.table.engine
        with engine.cursor.compute(Kind.FORWARD, EMBED), torch.no_grad():
            hidden = self.look_up(received)
            if self.forward_state is not None and not self.table.is_linear:
                self._weight = received.clone()
            engine.device.poison(received)
        return hidden

    def backward(self, grad: torch.Tensor) -> None:
        """Sum the gradients of each row on the device, and send only these rows to the host."""
        table, engine = self.table, self.table.engine
        shape = (self.rows.numel(), table.width)
        dtype = engine.store.precision.grad_dtype
        outgoing = engine.memory.table_row_grads.get(shape[0] * shape[1], dtype, room=self.room * shape[1]).view(shape)
        engine.cursor.bind(Kind.STREAM_OUT, EMBED, [table.landing(self.rows, outgoing, self.room)])
        with engine.cursor.compute(Kind.BACKWARD, EMBED):
            if table.is_linear:  # the gradient does not depend on the values, so one zero stands for all of them
                weight = torch.zeros((), dtype=engine.options.compute_dtype, device=grad.device).expand(shape)
            else:
                assert self._weight is not None
                weight, self._weight = self._weight, None
            weight.requires_grad_()
            with torch.enable_grad():
                (row_grads,) = torch.autograd.grad(self.look_up(weight), weight, grad)
            outgoing.copy_(row_grads)
            engine.landed(EMBED, [table._name])


class _TableFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, use: _Use, received: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.use = use
        return use.forward(received)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        use: _Use = ctx.use
        assert use.forward_state is not None
        with use.table.engine.backward_of(use.forward_state):
            use.backward(grad)
        return None, None, None
