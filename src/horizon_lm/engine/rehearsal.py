"""A forward that only shows what blocks take on the device, so that it can be planned what stays there."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from horizon_lm.engine.engine import Engine
from horizon_lm.engine.residency import find_footprint, plan_device
from horizon_lm.engine.rows import BlockCall, ProbeDoneError, RowOutputs, slice_rows
from horizon_lm.model import capture
from horizon_lm.model.attention import Segments, attending
from horizon_lm.model.block import StreamedBlock, structure_key
from horizon_lm.plan.residency import DevicePlan
from horizon_lm.plan.work import Footprint


class Rehearsal:
    """Stands in for the blocks in one forward. Of each structure one block is tried; what the others give is made up.

    Args:
        engine: of the model.
        blocks: of the model.
        dims_of: the row dimensions of a block's inputs.
        outputs: by block, takes the structure of what it gives.
        segments: of the batch's rows.
    """

    def __init__(
        self, engine: Engine, blocks: Sequence[StreamedBlock], dims_of: Callable[[int, BlockCall], list[int | None]],
        outputs: dict[int, RowOutputs], segments: Segments | None,
    ) -> None:  # fmt: skip
        self._engine, self._blocks, self._dims_of, self._outputs = engine, blocks, dims_of, outputs
        self._kinds = [structure_key(each.module) for each in blocks]
        self._segments = segments
        self._tried: dict[Any, RowOutputs] = {}  # by kind of block
        self._footprints: dict[Any, Footprint] = {}
        self._hidden: torch.Tensor | None = None  # input of the first block, for the whole batch

    def forward(self, index: int, call: BlockCall) -> Any:
        """In the place of a block's forward. ProbeDoneError at the last one."""
        kind = self._kinds[index]
        if self._hidden is None:
            self._hidden = call.tensors[call.hidden]
        if kind not in self._tried:
            self._tried[kind] = self._try(index, call)
        if index == len(self._blocks) - 1:
            raise ProbeDoneError
        outputs = self._outputs[index] = self._tried[kind]
        return outputs.rebuild(outputs.imitate(self._engine.num_rows))[0]

    def _try(self, index: int, call: BlockCall) -> RowOutputs:
        (start, stop), *_ = self._engine.micro_batches()
        dims = self._dims_of(index, call)
        part = [slice_rows(t, d, start, stop) for t, d in zip(call.tensors, dims, strict=True)]
        with attending(self._segments, start, stop), capture.capture(()):
            footprint, output = find_footprint(self._engine, self._blocks[index], *call.rebuild(part))
        self._footprints[self._kinds[index]] = footprint
        outputs = RowOutputs(self._engine.num_rows)
        outputs.add(start, stop, (output, {}))  # as a block that captured nothing
        outputs.release()
        return outputs

    def plan(self) -> DevicePlan:
        """What may stay on the device."""
        assert self._hidden is not None
        return plan_device(self._engine, [self._footprints[kind] for kind in self._kinds], self._hidden)
