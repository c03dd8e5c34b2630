"""Run calls of a streamed model as one pass of the engine: inputs, planning, and the modules that the pass streams.

Shapes: B batch rows, T tokens of a row.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from horizon_lm.engine.calls.calls import Call, choose_cache, prepare_batch, require_supported
from horizon_lm.engine.calls.pass_orders import PassOrders
from horizon_lm.engine.host.parameters import StandIn
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.forward_pass import Batch, ForwardRequest
from horizon_lm.engine.passes.forward_state import PassOrder
from horizon_lm.engine.passes.lockstep import keep_graph_together, run_together
from horizon_lm.engine.passes.micro_batches import split_batches
from horizon_lm.engine.passes.residency_planner import Rehearsal, ResidencyPlanner
from horizon_lm.engine.units.blocks import Blocks
from horizon_lm.engine.units.embedding import StreamedEmbedding
from horizon_lm.engine.units.lm_head import LmHead
from horizon_lm.engine.units.outer import OuterParameters
from horizon_lm.model.functional import in_place
from horizon_lm.model.generation import cache_of
from horizon_lm.model.trial import answering, answers_of
from horizon_lm.planning.arithmetic.residency import BatchSize

Compute = Callable[[list[Call], dict[str, torch.Tensor]], list[Any]]  # calls and outer parameters -> outputs


class PassRunner:
    """The passes of a streamed model.

    Args:
        engine: the model's engine.
        blocks, tables, head: the units that the model calls.
        call_model: the model's own forward method.
        model_name: the model's class, for messages.
        images: as in `Examined`.

    Attributes:
        planner: plans what stays on the device.
    """

    def __init__(
        self, engine: Engine, blocks: Blocks, tables: Sequence[StreamedEmbedding], head: LmHead, *,
        call_model: Callable[..., Any], model_name: str, images: frozenset[str],
    ) -> None:  # fmt: skip
        self._engine, self._blocks, self._tables, self._head = engine, blocks, tables, head
        self._outer, self._orders = OuterParameters(engine), PassOrders(engine, call_model)
        self._call_model, self._model_name, self._images = call_model, model_name, images
        self.planner = ResidencyPlanner(engine)

    def run(self, calls: list[Call], compute: Compute, may_have_head_grads: bool) -> list[Any]:
        """Run ``compute`` as one pass of the engine, after planning for batches larger than all before.

        Args:
            calls: arguments of the model's forward method for each batch, by name.
            compute: function of these arguments and the outer parameters on the device that returns the outputs.
            may_have_head_grads: the head's gradients may be computed in the forward pass.
        """
        engine = self._engine
        batches = [prepare_batch(engine, call) for call in calls]
        inputs_need_grad = any(_needs_grad(batch.call.get("inputs_embeds")) for batch in batches)
        # Without anything to differentiate no boundary is kept, as in evaluation.
        recording = torch.is_grad_enabled() and (inputs_need_grad or any(engine.trainable().values()))
        # After `recording` is known: a cache is rejected in training only.
        for batch in batches:
            choose_cache(batch.call, recording)
            most_rows = engine.options.rows_at_once(batch.rows)
            require_supported(batch, most_rows, self._model_name, self._images)
        # The code around the blocks is tried only in a model with towers.
        with self._stand_ins() if engine.parts.towers else nullcontext():
            order = self._orders.of(batches, recording, inputs_need_grad)
        size = self._size_of(batches)
        # Before the pass, not within it: what is planned for a batch already holds in its own step.
        if recording and self.planner.is_needed(size):
            # The step draws what it would have drawn without a rehearsal, so limited memory changes no numbers.
            with engine.device.rng_state_restored():
                self._plan(batches, size, order)
        caching = any(batch.call.get("use_cache") or cache_of(batch.call) is not None for batch in batches)
        request = ForwardRequest(
            batches,
            recording,
            order,
            # The head has one buffer for gradients, which a pass that awaits its backward pass may be using.
            may_have_head_grads=may_have_head_grads and recording and engine.between.head_grads_lease.holder is None,
            draws=engine.parts.model.training,
            caching=caching,
            routed=frozenset() if recording else self._selective_blocks(batches, size, caching),
        )
        # The pass is open before the outer parameters load, since their copies are its first operations; outer code
        # reads them in place until the pass ends.
        with engine.forward_pass(request):
            outer = self._outer.load()
            with self._outer.in_place(outer), self._stand_ins():
                return compute([batch.call for batch in batches], outer)

    def call_all(self, calls: list[Call]) -> list[Any]:
        """Run the model's original forward method for each call, in lock-step: each unit is computed for all calls. Return the outputs."""
        # In the order of the batches in the request, by which embedding and blocks find the batch of a call.
        outputs = run_together([partial(self._call_model, **call) for call in calls])
        if len(calls) > 1:
            keep_graph_together(outputs)
        return outputs

    def _size_of(self, batches: list[Batch]) -> BatchSize:
        """Return the size of a step with these batches."""
        return BatchSize(
            tokens=sum(batch.rows * batch.length for batch in batches),
            length=max(batch.length for batch in batches),
            tokens_at_once=max(map(self._tokens_at_once, batches)),
            is_masked=any(batch.call.get("attention_mask") is not None for batch in batches),
            modal=sum(batch.call[name].numel() for batch in batches for name in batch.modal),
        )

    def _tokens_at_once(self, batch: Batch) -> int:
        """Return the tokens of a micro-batch of a batch."""
        return self._engine.options.rows_at_once(batch.rows) * batch.length

    def _selective_blocks(self, batches: list[Batch], size: BatchSize, caching: bool) -> frozenset[int]:
        """Return the blocks of which a pass without gradients streams only the experts that its tokens are routed to."""
        engine = self._engine
        # With a cache, blocks run whole and uncompiled, whatever the options are (`ForwardRequest.caching`).
        is_whole = caching or size.tokens_at_once == size.tokens  # the batch is not cut into micro-batches
        is_compiled = engine.options.compile and not caching
        # A compiled block cannot stop between its router and its experts. Several ranks would have to agree on the experts.
        if len(batches) > 1 or not is_whole or is_compiled or engine.mesh.size > 1:
            return frozenset()
        return engine.tiles.routed(size.tokens)

    def _stand_ins(self) -> AbstractContextManager[None]:
        """Context manager: replace the weights of head and embedding by stand-ins.

        Models read the dtype and device of these weights, which in the streamed parameters are those of host memory.
        """
        dtype, device = self._engine.options.compute_dtype, self._engine.device.torch_device
        head_dtype = self._engine.parts.head_dtype(dtype)
        # Module, attribute, dtype, and the function that reads rows of the weight; None if the weight cannot be indexed.
        places: list[tuple[Any, str, torch.dtype, Any]] = [
            *((module, name, head_dtype, None) for module, name in self._head.streamed_places()),
            *((table.module, "weight", dtype, table.read) for table in self._tables),
        ]
        return in_place(
            (module, name, StandIn.of(module._parameters[name], own_dtype, device, read))
            for module, name, own_dtype, read in places
        )

    def _plan(self, batches: list[Batch], size: BatchSize, order: PassOrder) -> None:
        """Plan what stays on the device. A rehearsal with the largest batch measures one block of each structure."""
        engine = self._engine
        largest = max(batches, key=lambda batch: (bool(batch.modal), self._tokens_at_once(batch)))
        num_micro_batches = len(split_batches([batch.rows for batch in batches], engine.options))
        # The rehearsal computes no block by the cursor, and saves nothing. It ends at the last block: head and loss are planned from
        # `head_peak`.
        request = ForwardRequest([largest], recording=False, order=self._orders.of_text(largest))
        rehearsal = Rehearsal(engine, self._blocks.blocks, self._blocks.cut)
        answers = answers_of(engine.parts.blocks, rehearsal.answer)
        with self.planner.without_residency():
            with (
                answering(answers),
                torch.no_grad(),
                engine.forward_pass(request),
                self._outer.in_place(self._outer.load()),
                self._stand_ins(),
            ):
                self._call_model(**largest.call)
            plan = rehearsal.plan(order, size, self._size_of([largest]), num_micro_batches)
            self.planner.adopt(plan, size)


def _needs_grad(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad
