"""The updates of a model's units: from gradients and the numbers of a step to moves that the engine runs."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from horizon_lm.common.units import EMBED, HEAD, OUTER, Unit, block
from horizon_lm.device.transfers import Move, chained
from horizon_lm.engine.host.updates import TableGrads
from horizon_lm.engine.passes.engine_state import EngineState
from horizon_lm.engine.passes.update_pass import DevicePart, UpdatePass
from horizon_lm.memory.arena import as_array
from horizon_lm.memory.kernels.gradients import compile_landing
from horizon_lm.memory.kernels.updates import Rule
from horizon_lm.memory.unit_slabs import Slab
from horizon_lm.optim.moments import Moments, SlabArrays
from horizon_lm.optim.update_tasks import (
    StepUpdate,
    TableRows,
    UpdateSpan,
    compile_kernels,
    first_parts,
    last_parts,
    span_pieces,
)
from horizon_lm.schedule import between


class UnitUpdates:
    """The slabs of all units, and their updates.

    Args:
        engine: the model's engine, with memory for gradients.
        moments: the moments of the optimizer.
        rules: the rule of each trained parameter, by full name.
        in_backward: units are updated before all gradients of a step are known to be finite.

    Attributes:
        arrays: the arrays of each slab of weights.
    """

    def __init__(self, engine: EngineState, moments: Moments, rules: Mapping[str, Rule], in_backward: bool) -> None:
        self._engine, self._store, self._rules, self._in_backward = engine, engine.store, rules, in_backward
        self.arrays = {slab: SlabArrays.of(slab, moments) for slab in self._store.slabs}

    def compile(self, settings: Mapping[str, Any]) -> None:
        """Compile the kernels, so that the first step takes no longer than later steps.

        Args:
            settings: settings of a parameter group.
        """
        compiled = set()
        for slab, arrays in self.arrays.items():
            is_table = slab.row is not None
            for rule in {self._rules[name] for name in arrays.grad_layout}:
                variant = (arrays.modes(rule), is_table)
                if variant in compiled:
                    continue
                compiled.add(variant)
                compile_kernels(arrays, rule, settings, is_table)
                # Gradients land in the dtype of the weights, or in fp32 if several were summed on the device.
                sources = {"float32", "float32" if arrays.weight_format == "float32" else "bfloat16"}
                compile_landing(arrays.grad_format, sources, is_table)

    def of_all(self, step: StepUpdate, present: Mapping[Unit, Iterable[str]]) -> UpdatePass:
        """Return the update of all units, in the order in which the next forward pass streams them in; that pass updates the embedding.

        Args:
            step: the numbers of the step.
            present: the parameters with a gradient, by unit.
        """
        blocks = [block(u) for u in range(self._engine.parts.num_blocks)]
        order = [OUTER, *blocks, *([] if self._engine.parts.tied else [HEAD])]
        spans = {
            unit: {slab: self._spans(step, slab, present[unit]) for slab in self._store.units[unit].saved}
            for unit in order
        }
        moves = {
            unit: chained([self._pieces(self.arrays[slab], slab, last_parts(some)) for slab, some in by_slab.items()])
            for unit, by_slab in spans.items()
        }
        on_device = {
            unit: self._on_device(slab, first)
            for unit, by_slab in spans.items()
            for slab, some in by_slab.items()
            if (first := first_parts(some))
        }
        table = None
        if present[EMBED]:
            table = self.of_table(step, TableGrads(self._store.grad(*self._store.units[EMBED].layout), None))
        updated = [unit for unit, pieces in moves.items() if pieces or unit in on_device]
        return UpdatePass(between.update(self._engine.layout, updated, on_device), moves, table, on_device)

    def of_slab(self, step: StepUpdate, slab: Slab, names: Iterable[str], grads: torch.Tensor) -> Sequence[Move]:
        """Return the update of these parameters of a slab, whose gradients will be in ``grads``."""
        return self._pieces(self.arrays[slab], slab, self._spans(step, slab, names), grads)

    def of_table(self, step: StepUpdate, grads: TableGrads) -> TableRows | None:
        """Return the update of the embedding, or None if it is not trained."""
        slab = self._store.units[EMBED].plain
        spans = self._spans(step, slab, slab.layout)
        if not spans:
            return None
        (span,) = spans  # the table is one tensor
        record_failure = self._engine.updates.partial_update.record
        return TableRows(self.arrays[slab], grads, span, record_failure, self._is_finite_once_landed(slab))

    def _spans(self, step: StepUpdate, slab: Slab, names: Iterable[str]) -> list[UpdateSpan]:
        """Return the spans of those parameters that lie in a slab; each span is updated alike."""
        params = {name: self._engine.refs[name].param for name in names if name in slab.layout}
        return step.spans(slab.name, self.arrays[slab], params, self._rules)

    def _on_device(self, slab: Slab, spans: Sequence[UpdateSpan]) -> DevicePart:
        """Return the part of a slab's update on the device, with the moves of the part before it, for spans of `first_parts`."""
        rule = spans[0].rule
        assert rule.on_device is not None
        moves = self._pieces(self.arrays[slab].of_grads(as_array(slab.grads)), slab, spans)
        return DevicePart(moves, [name for span in spans for name in span.names], rule.on_device.compute)

    def _pieces(
        self, arrays: SlabArrays, slab: Slab, spans: Sequence[UpdateSpan], grads: torch.Tensor | None = None
    ) -> Sequence[Move]:
        """Return the update of some spans of a slab. ``grads`` is this rank's range of its gradients; None for that range in the store."""
        values = slab.grads[slab.own_grads] if grads is None else grads
        record_failure = self._engine.updates.partial_update.record
        return span_pieces(arrays, spans, as_array(values), record_failure, self._is_finite_once_landed(slab))

    def _is_finite_once_landed(self, slab: Slab) -> Callable[[], bool]:
        """Return a function that returns whether a slab's gradient is finite; each piece of an update calls it, after the landing."""
        if not self._in_backward:  # `step` has checked all gradients
            return lambda: True
        squared_norms = self._engine.grads.squared_norms
        return lambda: math.isfinite(squared_norms.of(slab) or 0.0)
