"""The computation of a block whose experts are moved in tiles: the core, its experts tile by tile, and the rest of the core.

All micro-batches are computed up to the experts before the first tile, so that each tile is copied once in a pass. What the
experts return is kept for the backward pass, which therefore copies and computes each tile once more, and not twice.

Passes of few tokens copy of each tile only the experts that these tokens are routed to: one token of a model with 128 experts reads
8 of them in each block. In such a pass the experts of a block that is not cut are one tile, too, in the block's own slot. Its own
function computes it as a whole, with the bits of a pass that streams the whole block.

Shapes: N tokens of a micro-batch, K experts of a token, H hidden size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from horizon_lm.common.ranges import length, runs
from horizon_lm.common.units import OUTER, Unit, block
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.lockstep import batched_call
from horizon_lm.engine.units.expert_call import ExpertCall
from horizon_lm.model.expert_adapters import of_experts
from horizon_lm.model.routed_experts import Experts, RoutedExperts, expert_arguments
from horizon_lm.model.some_experts import some_experts
from horizon_lm.model.trial import answering
from horizon_lm.schedule.ops import Kind

Replacement = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of hidden states (N, H), experts (N, K) and their weights (N, K) that returns (N, H)."""


@dataclass(slots=True)
class WholeCall:
    """A call of the experts of a block that is not cut, which their own function computes.

    Attributes:
        count: number of experts.
        hidden, ids, weights: as in `ExpertCall`.
        output: the experts' output (N, H), once it is computed.
    """

    count: int
    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    output: torch.Tensor | None = None

    def chosen(self) -> list[int]:
        """Return the experts that tokens are routed to. The host waits for them."""
        # Some models give a token without an expert the number after that of the last expert.
        return [each for each in set(self.ids.flatten().tolist()) if each < self.count]

    def compute(self, _: slice, function: Experts) -> None:
        """Compute all experts by their function."""
        self.output = function(self.hidden, self.ids, self.weights)

    def finish(self) -> None:
        """Do nothing: the output is complete."""


class TiledExperts:
    """The experts of a block.

    Args:
        engine: the model's engine.
        index: the block's index.

    Attributes:
        adapters: full names of the weights of the adapters that the experts' own tensors have.
    """

    def __init__(self, engine: Engine, index: int) -> None:
        self._engine, self._index = engine, index
        self._experts: RoutedExperts = engine.tiles.experts[index]
        self._called_module = self._experts.called
        self._own_forward = self._called_module.forward  # before it is replaced
        self._prefix = f"{engine.parts.block_names[index]}."
        self.adapters = [self._prefix + name for name in self._experts.adapters]

    @property
    def tiles(self) -> list[Unit]:
        """The tiles, in the order of the forward pass."""
        return self._engine.tiles.tiles_of(self._index)

    def call(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, before: ExpertCall | None = None
    ) -> ExpertCall:
        """Return a call of the experts; ``before`` is the same call in the forward pass."""
        return ExpertCall(self._experts.module, self._experts.count, hidden, ids, weights, before)

    @contextmanager
    def forward(self, calls: list[Any]) -> Iterator[None]:
        """Context manager: compute a block in the running forward pass: its core up to the experts (ROUTE), the tiles, and the rest
        of the core (FORWARD). In place of the experts, a micro-batch calls `batched` and waits there; when all have arrived, `compute`
        runs once for all of them. Append their calls of the experts to ``calls``.
        """
        engine, unit = self._engine, block(self._index)
        cursor, experts_called = engine.cursor, False
        make = self.call if engine.tiles.is_cut(self._index) else partial(WholeCall, self._experts.count)
        # `current` holds the computation that the cursor is in: first ROUTE, and from the end of `compute` on FORWARD.
        with self._own_randomness(), ExitStack() as current:
            current.enter_context(cursor.compute(Kind.ROUTE, unit))

            def compute(arrived: Sequence[ExpertCall | WholeCall]) -> Sequence[ExpertCall | WholeCall]:
                nonlocal experts_called
                experts_called = True
                if self._index in engine.forward.routed:
                    self._stream_chosen(arrived)
                current.pop_all().close()  # ends ROUTE, before the tiles' computations
                self._compute_tiles(arrived)
                current.enter_context(cursor.compute(Kind.FORWARD, unit))
                calls.extend(arrived)
                return arrived

            def batched(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
                with self._own_randomness():  # other micro-batches draw numbers while this one waits for their calls
                    call = batched_call(("experts", unit), make(hidden, ids, weights), compute)
                output: torch.Tensor = call.attach(hidden, weights) if torch.is_grad_enabled() else call.output
                return output

            with self.replaced(batched):
                yield
            if not experts_called:  # the block has left out its experts
                compute([])

    def _own_randomness(self) -> AbstractContextManager[None]:
        """Context manager: put back the present random state at the end, since other micro-batches replace it meanwhile."""
        engine = self._engine
        return engine.device.rng_state_restored() if engine.forward.randomness.has_streams else nullcontext()

    def _stream_chosen(self, calls: Sequence[ExpertCall | WholeCall]) -> None:
        """Bind copies of only those experts of each tile that tokens are routed to."""
        engine, chosen = self._engine, sorted({expert for call in calls for expert in call.chosen()})
        for unit in self.tiles:
            experts = engine.tiles.experts_of(unit)
            some = runs(e for e in chosen if experts.start <= e < experts.stop)
            part, slot = engine.part_of(unit), engine.memory.weights_of(unit)
            engine.cursor.bind(Kind.STREAM_IN, unit, part.moves(slot, engine.tiles.decoded(unit), some))

    @torch.no_grad()
    def _compute_tiles(self, calls: Sequence[ExpertCall | WholeCall]) -> None:
        """Compute all tiles, each for all micro-batches."""
        engine = self._engine
        for unit in self.tiles:
            with engine.cursor.compute(Kind.FORWARD, unit), self.bound(unit, self.weights(unit)) as function:
                for call in calls:
                    call.compute(engine.tiles.experts_of(unit), function)
                if not engine.part_of(unit).in_place:  # or the rest of the core would be lost, too
                    engine.poison_weights(unit)
        for call in calls:
            call.finish()

    def replaced(self, function: Replacement) -> AbstractContextManager[None]:
        """Context manager: call a function instead of the block's experts."""
        return answering({self._called_module: lambda *args, **kwargs: function(*expert_arguments(args, kwargs))})

    def weights(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Return a tile's weights on the device, with its part of the experts' adapters, by full name."""
        engine = self._engine
        # Adapters lie with the outer parameters, which are on the device throughout a pass.
        layout, buffer = engine.store.units[OUTER].layout, engine.memory.weights_of(OUTER)
        adapters = {name: self.part_of_adapter(unit, name, layout.view(buffer, name)) for name in self.adapters}
        return engine.weights_on_device(unit) | adapters

    def part_of_adapter(self, unit: Unit, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return the part of an adapter's values, or of their gradients, that belongs to a tile, as a view."""
        return of_experts(name, values, self._experts.count, self._engine.tiles.experts_of(unit))

    @contextmanager
    def bound(self, unit: Unit, weights: Mapping[str, torch.Tensor]) -> Iterator[Experts]:
        """Context manager: put a tile's weights in place of the experts' own. Yield the function that computes with those in place.

        Args:
            unit: the tile.
            weights: its weights on the device, by full name (`weights`).
        """
        experts = self._engine.tiles.experts_of(unit)
        by_local_name = {name.removeprefix(self._prefix): tensor for name, tensor in weights.items()}
        with some_experts(self._experts, length(experts), by_local_name):
            yield self._own_forward
