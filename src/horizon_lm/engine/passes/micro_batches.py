"""Split the inputs of a block into micro-batches, run one of them with random numbers of its own, and merge the outputs.

Shapes: B batch rows, T tokens of a row.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from horizon_lm.common.ranges import consecutive, pieces
from horizon_lm.common.streaming_options import WHOLE_BATCHES, StreamingOptions
from horizon_lm.device.base import Device, same_rng_state
from horizon_lm.engine.passes.tree import Tree
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model import capture
from horizon_lm.model.attention import Segments, attending
from horizon_lm.model.block_template import StreamedBlock

Rows = tuple[int, int]  # the rows [start, stop) of a batch


@dataclass(frozen=True, slots=True)
class Borders:
    """A tensor with the first row of each segment in order, and the number of all rows, as attention in segments of different lengths
    takes them.

    Attributes:
        values: its values, if the host knows them; otherwise they are read when it is cut, which waits for the device.
    """

    values: Sequence[int] = ()


# The dimension of a tensor that has the rows, both dimensions of a mask from rows to rows, the borders between rows, or none.
RowDim = int | tuple[int, int] | Borders | None
_OUTSIDE = 1 << 61  # the bit in which the seed of code outside of blocks differs from a micro-batch's seed


class MicroBatch(NamedTuple):
    """Rows that a block computes at once: the rows [start, stop) of one of the batches of a pass.

    Attributes:
        batch: the number of the batch; each is computed by a call of the model.
        start, stop: its rows.
        is_whole: the micro-batch has all rows of the batch, so nothing is sliced.
        dim: the dimension of the rows in the outputs of a block.
    """

    batch: int
    start: int
    stop: int
    is_whole: bool
    dim: int = 0

    @property
    def rows(self) -> Rows:
        """The rows [start, stop)."""
        return self.start, self.stop


def split_batches(num_rows: Sequence[int], options: StreamingOptions | None) -> list[MicroBatch]:
    """Split batches into micro-batches.

    Args:
        num_rows: the number of rows of each batch.
        options: the options with the size of a micro-batch; None to split no batch.
    """
    micro_batches = []
    for batch, count in enumerate(num_rows):
        size = count if options is None else options.rows_at_once(count)
        found = pieces(count, size)
        micro_batches += [MicroBatch(batch, part.start, part.stop, len(found) == 1) for part in found]
    return micro_batches


def cut_batches(micro_batches: Iterable[MicroBatch]) -> set[int]:
    """Return the numbers of the batches that have several micro-batches."""
    return {part.batch for part in micro_batches if not part.is_whole}


class BlockCall(Tree):
    """The arguments of one block call, with the tensors removed.

    Attributes:
        hidden: the index of the hidden states among the tensors.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__((args, kwargs))
        # The hidden states are the first positional argument, or a keyword argument of that name.
        self.hidden = 0 if args else next(i for i, (path, _) in enumerate(self.paths) if "hidden_states" in path)


class BatchParts(NamedTuple):
    """The micro-batches in which a block computes some batches of a pass.

    Attributes:
        batches: the numbers of these batches in the pass.
        rows: the number of rows of each batch. In a tower that is cut these are its images, or patches of images.
        parts: the micro-batches; each has the number of its batch among these batches.
        streams: for each micro-batch, the number of its random stream.
        segments: for each batch, the documents in its rows, if attention needs them.
        num_rows: the rows of all these batches, which statistics count.
    """

    batches: Sequence[int]
    rows: Sequence[int]
    parts: Sequence[MicroBatch]
    streams: Sequence[int]
    segments: Sequence[Segments | None]
    num_rows: int


class BlockCalls:
    """The calls of one block in a pass: one for each batch that it computes, with their tensors in one list.

    Attributes:
        calls: the call for each batch.
        cut: the micro-batches in which they are computed.
        dims: the row dimension of each of their tensors; None for a tensor without rows, and for one whose batch has a single micro-batch.
        spans: for each call, the range of its tensors among the tensors of all calls.
        hidden: for each call, the index of its hidden states among the tensors of all calls.
    """

    def __init__(self, calls: Sequence[BlockCall], cut: BatchParts) -> None:
        self.calls, self.cut = calls, cut
        self.dims: list[RowDim] = [None for call in calls for _ in call.tensors]
        self.spans = consecutive(len(call.tensors) for call in calls)
        self.hidden = [span.start + call.hidden for span, call in zip(self.spans, calls, strict=True)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of all calls, in order; empty after `drop_tensors`."""
        return [tensor for call in self.calls for tensor in call.tensors]

    def drop_tensors(self) -> None:
        """Drop the tensors and keep only the structure."""
        for call in self.calls:
            call.drop_tensors()

    def inputs(self, tensors: Sequence[Any], part: MicroBatch) -> list[torch.Tensor]:
        """Return the rows of a micro-batch of each tensor of its batch. ``tensors``: the tensors of all calls."""
        span = self.spans[part.batch]
        return slice_all(tensors[span], self.dims[span], part.rows)


def run_block(
    module: StreamedBlock, args: tuple[Any, ...], kwargs: dict[str, Any], keys: tuple[str, ...],
    segments: Segments | None, rows: Rows, uncompiled: bool, unread: bool = False,
) -> Any:  # fmt: skip
    """Run a block's original forward method on one micro-batch, with the weights that are bound to it.

    Args:
        module: the block.
        args, kwargs: its arguments, cut to the micro-batch.
        keys: names of the outputs that transformers captures inside the block.
        segments: the documents in the batch's rows, if attention needs them.
        rows: the micro-batch.
        uncompiled: run the block uncompiled, regardless of its setting.
        unread: nobody reads the output, which may have no values (`StreamedBlock.forward`).

    Returns:
        The block's output, and the captured outputs by key.
    """
    with capture.capture(keys) as captured, attending(segments, *rows):
        return module.forward(*args, uncompiled=uncompiled, unread=unread, **kwargs), captured


def slice_rows(tensor: torch.Tensor, dim: RowDim, rows: Rows) -> torch.Tensor:
    """Return these rows of a tensor, or the whole tensor if it has no row dimension. Borders are counted from the first of these rows."""
    start, stop = rows
    if isinstance(dim, Borders):
        values = dim.values or tensor.tolist()
        return tensor[bisect_left(values, start) : bisect_right(values, stop)] - start
    for each in () if dim is None else (dim,) if isinstance(dim, int) else dim:
        tensor = tensor.narrow(each, start, stop - start)
    return tensor


def slice_all(tensors: Iterable[torch.Tensor], dims: Iterable[RowDim], rows: Rows) -> list[torch.Tensor]:
    """Return these rows of each tensor."""
    return [slice_rows(tensor, dim, rows) for tensor, dim in zip(tensors, dims, strict=True)]


def rows_of_output(whole: torch.Tensor, output: torch.Tensor, part: MicroBatch) -> torch.Tensor:
    """Return the part of a batch's output that belongs to a micro-batch.

    The row dimension of an output has one or several entries for each row: B * T in the output (B * T, experts) of a router.

    Args:
        whole: the output of the whole batch, or its gradient.
        output: the output of the micro-batch, whose length says how many entries a row has.
        part: the micro-batch.
    """
    if whole.shape == output.shape:  # the micro-batch is the whole batch, and the output may be a scalar
        return whole
    entries_per_row = output.shape[part.dim] // (part.stop - part.start)
    return slice_rows(whole, part.dim, (part.start * entries_per_row, part.stop * entries_per_row))


class RowOutputs:
    """The outputs of a block for the whole batch, merged from those of the micro-batches.

    Their row dimension has one or several entries per row: (B, T, H), or (B * T, experts) for a router.

    Attributes:
        tensors: the tensors of the output; empty before the first micro-batch and after `release`.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows, self._dim = num_rows, 0
        self._tree: Tree | None = None  # the structure of the first micro-batch's output
        # Of the whole batch's tensors, for `zeros` after their release.
        self._like: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self.tensors: list[torch.Tensor] = []

    def add(self, part: MicroBatch, output: Tree) -> None:
        """Add the output of a micro-batch. Its tensors are dropped from the tree."""
        start, stop = part.rows
        is_whole = stop - start == self._num_rows  # the only micro-batch: nothing is copied
        if self._tree is None:
            self._tree, self._dim = output, part.dim
            self.tensors = output.tensors if is_whole else [self._empty_whole(t, stop - start) for t in output.tensors]
            # Now, because `release` leaves no tensors.
            self._like = [(t.shape, t.dtype, t.device) for t in self.tensors]
        if not is_whole:
            self._copy_rows(start, stop, output.tensors)
        # The tree is kept for its structure; its tensors are in `tensors` now.
        output.drop_tensors()

    def _copy_rows(self, start: int, stop: int, tensors: list[torch.Tensor]) -> None:
        """Copy the output of the rows [start, stop) into the whole."""
        for whole, part in zip(self.tensors, tensors, strict=True):
            per_row = part.shape[self._dim] // (stop - start)
            # Copied part by part, not concatenated at the end, when all parts and the whole would exist at once.
            slice_rows(whole, self._dim, (start * per_row, stop * per_row)).copy_(part)

    def _empty_whole(self, part: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return an empty tensor for the whole batch, shaped like the part from ``num_rows`` rows. Reject a part without rows."""
        if part.ndim <= self._dim or part.shape[self._dim] % num_rows:
            raise ModelNotSupportedError(
                f"a block's output of shape {tuple(part.shape)} does not follow the rows of the batch, so it cannot be "
                f"put together from micro-batches; {WHOLE_BATCHES}"
            )
        return part.new_empty(self._resized(part.shape, num_rows, self._num_rows))

    def _resized(self, shape: Sequence[int], num_rows: int, new_rows: int) -> list[int]:
        """Return the shape of an output for ``num_rows`` rows, for another number of rows."""
        size = shape[self._dim] // num_rows * new_rows
        return [*shape[: self._dim], size, *shape[self._dim + 1 :]]

    @property
    def num_tensors(self) -> int:
        """The number of tensors of the output."""
        return len(self._like)

    def release(self) -> None:
        """Release the tensors and keep only the structure."""
        self.tensors = []

    @property
    def num_rows(self) -> int:
        """The number of rows of the batch."""
        return self._num_rows

    def zeros(self, num_rows: int) -> Any:
        """Return zeros in the structure of a block's output for another number of rows, without the outputs captured inside of it."""
        zeros = []
        for shape, dtype, device in self._like:
            size = self._resized(shape, self._num_rows, num_rows) if shape else ()
            zeros.append(torch.zeros(size, dtype=dtype, device=device))
        output, _ = self.rebuild(zeros)  # the second part of what `run_block` returns is captured
        return output

    def rebuild(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return the output structure filled with these tensors."""
        assert self._tree is not None
        return self._tree.rebuild(tensors)


class MicroBatchRandomness:
    """The random states of the micro-batches of one forward pass.

    A single micro-batch uses the global generators, as plain Hugging Face does. If there are several, each has a random
    stream, seeded by one draw from the global generator (`micro_batch_seeds`), which continues from block to block.

    Code outside of blocks draws from the global generators, which are the same on all ranks at the begin of a pass. So with
    several ranks, they are replaced meanwhile.

    Args:
        device: the model's device.
        num_micro_batches: the number of micro-batches.
        num_before: number of micro-batches of the ranks before this one.
        num_everywhere: number of micro-batches of all ranks; None for one rank. All ranks draw the seeds of all micro-batches, so
            that a micro-batch has the same one on any rank.
        draws: let the draw advance the global generator, if a micro-batch uses its random numbers. In evaluation plain
            Hugging Face draws nothing, so the generator is reset afterwards, and training continues as if there had been
            no evaluation.
    """

    def __init__(
        self, device: Device, num_micro_batches: int, draws: bool = True, num_before: int = 0,
        num_everywhere: int | None = None,
    ) -> None:  # fmt: skip
        self._device = device
        # The state of each micro-batch's random stream; None if there is one micro-batch, which uses the global generators.
        self._streams: list[Any] | None = None
        self._draws = draws
        self._outer_state: Any = None  # the state of the global generators, while they are replaced
        self._num_seeds = num_micro_batches if num_everywhere is None else num_everywhere
        if self._num_seeds > 1:
            self._before_draw = torch.get_rng_state()
            seeds = micro_batch_seeds(self._num_seeds)[num_before : num_before + num_micro_batches]
            self._after_draw = torch.get_rng_state()
            # The draw is taken back: `finish` repeats it if a micro-batch has used its numbers.
            torch.set_rng_state(self._before_draw)
            self._first_states = [device.seeded_rng_state(seed) for seed in seeds]
            self._streams = list(self._first_states)
            # Seeded by this rank's first micro-batch, so that each rank draws other numbers outside of blocks.
            if num_everywhere is not None and draws:
                self._outer_state, self._replacement = device.rng_state(), device.seeded_rng_state(seeds[0] ^ _OUTSIDE)
                device.set_rng_state(self._replacement)

    @property
    def has_streams(self) -> bool:
        """True if micro-batches have random streams of their own."""
        return self._streams is not None

    def restore(self) -> bool:
        """Put the global generators back, if they were replaced. Return whether numbers were drawn while they were."""
        if self._outer_state is None:
            return False
        was_drawn_from = not same_rng_state(self._device.rng_state(), self._replacement)
        self._device.set_rng_state(self._outer_state)
        self._outer_state = None
        return was_drawn_from

    def finish(self) -> None:
        """Advance the global generator by the draw of the seeds, if any number was drawn from what they seeded.

        Without dropout a plain model draws nothing in its blocks, so the next numbers outside of them, such as noise on
        embeddings, must not move on either. Ranks decide alike, because they run the same model.
        """
        drawn_outside = self.restore()
        if self._streams is None or not self._draws:
            return
        drawn_in_blocks = not all(map(same_rng_state, self._streams, self._first_states))
        if not (drawn_in_blocks or drawn_outside):
            return
        # If other code has drawn from the global generator since, the seeds are drawn once more, after its numbers.
        if torch.equal(self._before_draw, torch.get_rng_state()):
            torch.set_rng_state(self._after_draw)
        else:
            micro_batch_seeds(self._num_seeds)

    @contextmanager
    def drawing(self, index: int) -> Iterator[Any]:
        """Context manager: draw from a micro-batch's random stream. Yield its initial state."""
        if self._streams is None:
            # Nothing is put back: the global generators go on, as in a plain model.
            yield self._device.rng_state()
            return
        with self._device.rng_state_restored(self._streams[index]):
            yield self._streams[index]
            self._streams[index] = self._device.rng_state()


def micro_batch_seeds(num_micro_batches: int) -> list[int]:
    """Return seeds for the micro-batches of a forward pass, using one draw from the global host generator."""
    return torch.randint(2**62, (num_micro_batches,), dtype=torch.int64).tolist()
