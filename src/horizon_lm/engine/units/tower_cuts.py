"""Cut the batches of a tower by their images.

A tower has no rows of the batch. It computes images side by side, (images, patches, H), or the patches of all images one after the other,
(patches, H) or (1, patches, H), with the borders between which patches attend to each other, or a mask. Which dimensions follow the images
is found by running the model's outer code with all images twice, as `RowDims` runs it with one more row. What is found is proven once
for each kind of block (`is_separable`).
"""

import re
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.forward_pass import Batch, version_of
from horizon_lm.engine.passes.micro_batches import (
    BatchParts,
    BlockCall,
    BlockCalls,
    Borders,
    MicroBatch,
    RowDim,
    Rows,
    cut_batches,
)
from horizon_lm.engine.units.row_dims import shapes_at
from horizon_lm.engine.units.separable import is_separable
from horizon_lm.errors import DeviceFaultError, DeviceMemoryError, WholeTowerWarning, warn
from horizon_lm.model.block_template import StreamedBlock, structure_key

_OF_IMAGES = re.compile("size|shape|grid|aspect|tile|crop")  # in names of arguments that describe images


class _Layout(NamedTuple):
    """The dimensions of a block's inputs that follow the images.

    Attributes:
        dims: the row dimension of each input.
        hidden: that of the hidden states, and of the outputs.
    """

    dims: list[RowDim]
    hidden: int

    def rows_of(self, call: BlockCall) -> int:
        """Return the number of images, or patches of images, of a call."""
        return call.tensors[call.hidden].shape[self.hidden]

    def fits(self, call: BlockCall) -> bool:
        """Return whether each input of a call has one entry for each of its rows."""
        rows = self.rows_of(call)
        return all(
            tensor.shape[each] == rows
            for tensor, dim in zip(call.tensors, self.dims, strict=True)
            for each in ((dim,) if isinstance(dim, int) else dim if isinstance(dim, tuple) else ())
        )


class TowerCuts:
    """The micro-batches of the blocks of towers: as many images, or patches of images, as the rows of a micro-batch have on average.

    Args:
        engine: the engine of the model.
        call_model: the model's own forward method.
        blocks: the blocks of the model.
    """

    def __init__(self, engine: Engine, call_model: Callable[..., Any], blocks: Sequence[StreamedBlock]) -> None:
        self._engine, self._call_model, self._blocks = engine, call_model, blocks
        self._layouts: dict[Any, _Layout | None] = {}  # by the kind of a block's inputs; None if they cannot be cut
        self._structures: dict[int, Any] = {}  # of blocks
        self._are_separable: dict[Any, bool] = {}  # by the structure of a block, and the kind of its inputs
        self._are_whole: set[range] = set()  # towers that a warning has named

    def cut(self, index: int, calls: BlockCalls) -> None:
        """Replace the micro-batches of a block's calls by smaller ones, if the batches are cut and the block allows it."""
        cut, cut_here = calls.cut, cut_batches(self._engine.forward.micro_batches)
        rows, parts, streams = list(cut.rows), list[MicroBatch](), list[int]()
        for number, (batch, call, whole) in enumerate(zip(cut.batches, calls.calls, cut.parts, strict=True)):
            found = [whole]
            if batch in cut_here and (layout := self._layout_of(index, batch, call)) is not None:
                rows[number] = layout.rows_of(call)
                found = [MicroBatch(number, 0, rows[number], True, layout.hidden)]
                pieces = self._pieces_of(index, batch, call, layout)
                if len(pieces) > 1:
                    found = [MicroBatch(number, start, stop, False, layout.hidden) for start, stop in pieces]
                    calls.dims[calls.spans[number]] = [
                        Borders(self._read(tensor, dim)) if isinstance(dim, Borders) else dim
                        for tensor, dim in zip(call.tensors, layout.dims, strict=True)
                    ]
            parts += found
            streams += [cut.streams[number]] * len(found)
        calls.cut = BatchParts(cut.batches, rows, parts, streams, cut.segments, cut.num_rows)

    def _pieces_of(self, index: int, batch: int, call: BlockCall, layout: _Layout) -> list[Rows]:
        """Return the pieces of a batch that a block computes at once; none if it computes the batch as a whole."""
        rows, of_batch = layout.rows_of(call), self._engine.forward.num_rows[batch]
        limit = -(-rows * self._engine.options.rows_at_once(of_batch) // of_batch)
        borders = self._borders(call, layout, rows)
        pieces = [] if borders is None else _pieces(borders, limit)
        if borders is not None and len(pieces) > 1:
            if index not in self._structures:
                self._structures[index] = structure_key(self._blocks[index].module)
            key = (self._structures[index], tuple(call.paths))
            if key not in self._are_separable:
                pair = _smallest_pair(borders)
                self._are_separable[key] = is_separable(self._engine, self._blocks[index], call, layout.dims, pair)
            if not self._are_separable[key]:
                borders = None
        if borders is None:
            self._warn_of_whole(index)
            return []
        return pieces

    def _borders(self, call: BlockCall, layout: _Layout, rows: int) -> list[int] | None:
        """Return the rows between which the inputs of a block can be cut, with the first row and the number of rows; None if there are none."""
        found = [
            set(self._read(tensor, dim))
            for tensor, dim in zip(call.tensors, layout.dims, strict=True)
            if isinstance(dim, Borders | tuple)
        ]
        if not found:
            # Side by side, each image with dimensions of its own; patches one after the other, (patches, H), would all attend to each other.
            return list(range(rows + 1)) if layout.hidden == 0 and call.tensors[call.hidden].ndim > 2 else None
        borders = sorted(set.intersection(*found))
        return borders if borders and (borders[0], borders[-1]) == (0, rows) else None

    def _read(self, tensor: torch.Tensor, dim: Borders | tuple[int, int]) -> list[int]:
        """Return the borders in a tensor; none if they are not in order. They are read once in a pass, because that waits for the device,
        and all blocks of a tower get the same tensors.
        """
        known, key = self._engine.forward.borders, (id(tensor), version_of(tensor), dim)
        if key not in known or known[key][0]() is not tensor:  # another one may have its identity once it is freed
            values = tensor.tolist() if isinstance(dim, Borders) else _borders_of_mask(tensor, dim)
            known[key] = weakref.ref(tensor), values if values == sorted(values) else []
        return known[key][1]

    def _warn_of_whole(self, index: int) -> None:
        """Warn once of each tower with a block that computes batches as a whole."""
        tower = self._tower_of(index)
        if tower not in self._are_whole:
            self._are_whole.add(tower)
            warn(
                f"{self._blocks[index].name}: this block computes all images of a batch at once, because it cannot be cut between them; "
                "device_micro_batch_size cuts the other blocks",
                WholeTowerWarning,
            )

    def _layout_of(self, index: int, batch: int, call: BlockCall) -> _Layout | None:
        """Return the dimensions that follow the images of a batch; None if they are not found."""
        # Without the number of the block: one trial serves all blocks of a tower whose inputs have the same names and ranks.
        key = (self._tower_of(index), tuple(call.paths))
        if key not in self._layouts:
            self._layouts[key] = self._find_layout(index, batch, call)
        layout = self._layouts[key]
        if layout is None or not layout.fits(call):
            self._warn_of_whole(index)
            return None
        return layout

    def _tower_of(self, index: int) -> range:
        """Return the tower that a block is in."""
        return next(each for each in self._engine.parts.towers if index in each)

    def _find_layout(self, index: int, batch: int, call: BlockCall) -> _Layout | None:
        """Find the dimensions by a trial with all images twice."""
        outputs = self._engine.forward.outputs

        def output(reached: int) -> Any:
            """Return zeros for all images twice."""
            of_batch = outputs[reached][batch]
            return of_batch.zeros(2 * of_batch.num_rows)

        try:
            call_of_twice = _with_images_twice(self._engine.forward.batches[batch])
            shapes = shapes_at(self._engine, self._call_model, index, call_of_twice, output)
        except (torch.OutOfMemoryError, DeviceMemoryError, DeviceFaultError):  # these say nothing about the block
            raise
        except Exception:  # the model's own code may raise any exception for other images than those of its rows
            return None
        pairs = [(each, shapes.get(path, each.shape)) for (path, _), each in zip(call.paths, call.tensors, strict=True)]
        if not all(_is_cuttable(*pair) for pair in pairs):
            return None
        dims = [_row_dim(*pair) for pair in pairs]
        hidden = dims[call.hidden]
        return _Layout(dims, hidden) if isinstance(hidden, int) else None


def _with_images_twice(batch: Batch) -> dict[str, Any]:
    """Return the arguments of a batch, with those of images, whose first dimension is images, patches or rows, one time after the other."""
    modal = {
        name
        for name, value in batch.call.items()
        if name in batch.modal or (isinstance(value, torch.Tensor) and _OF_IMAGES.search(name))
    }
    return {name: torch.cat([value, value]) if name in modal else value for name, value in batch.call.items()}


def _is_cuttable(tensor: torch.Tensor, larger: torch.Size) -> bool:
    """Return whether an input, which has another shape for all images twice, follows the images in a way that can be cut."""
    if tensor.ndim != len(larger):
        return False
    changed = [dim for dim in range(tensor.ndim) if tensor.shape[dim] != larger[dim]]
    return len(changed) <= 2 and (
        _has_borders(tensor, larger) or all(larger[dim] == 2 * tensor.shape[dim] for dim in changed)
    )


def _row_dim(tensor: torch.Tensor, larger: torch.Size) -> RowDim:
    """Return the row dimension of an input, from its shape for all images twice."""
    changed = [dim for dim in range(tensor.ndim) if tensor.shape[dim] != larger[dim]]
    if not changed:
        return None
    if _has_borders(tensor, larger):
        return Borders()
    return changed[0] if len(changed) == 1 else (changed[0], changed[1])


def _has_borders(tensor: torch.Tensor, larger: torch.Size) -> bool:
    """Return whether an input has one entry more than there are segments."""
    return (
        tensor.ndim == 1 and not tensor.is_floating_point() and larger[0] == 2 * tensor.shape[0] - 1 > tensor.shape[0]
    )


def _borders_of_mask(mask: torch.Tensor, dims: tuple[int, int]) -> list[int]:
    """Return the rows across which a mask lets nothing through. ``dims``: its dimensions of rows."""
    visible = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask.bool()
    visible = visible.movedim(dims, (0, 1)).flatten(2).any(2) if mask.ndim > 2 else visible  # (rows, rows)
    rows, sees_any = visible.shape[0], visible.any(1)
    places = torch.arange(rows, device=mask.device)
    bits = visible.contiguous().view(
        torch.uint8
    )  # with the memory of the mask's bits; masked places would take eight times as much
    last = (
        torch.where(sees_any, rows - 1 - bits.flip(1).argmax(1), -1).cummax(0).values
    )  # visible from a row and those before
    first = torch.where(sees_any, bits.argmax(1), rows).flip(0).cummin(0).values.flip(0)  # and from those behind
    between = (last[:-1] < places[1:]) & (first[1:] >= places[1:])
    return [0, *(place for place, is_border in enumerate(between.tolist(), 1) if is_border), rows]


def _smallest_pair(borders: Sequence[int]) -> list[Rows]:
    """Return the two smallest pieces between three borders that follow each other."""
    triples = zip(borders, borders[1:], borders[2:], strict=False)
    start, middle, stop = min(triples, key=lambda each: each[2] - each[0])
    return [(start, middle), (middle, stop)]


def _pieces(borders: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Return pieces [start, stop) between borders, each of at most ``limit`` rows unless it lies between two neighbouring borders."""
    pieces, start = [], borders[0]
    for border, following in pairwise(borders):
        if following - start > limit and border > start:
            pieces.append((start, border))
            start = border
    return [*pieces, (start, borders[-1])]
