"""Measure what the images of rows cost: in the blocks of towers, and in the model's code around them.

The code around the blocks runs on the CPU over rows with images, because the values of some arguments, such as the size of an
image, decide the shapes of others. Its matrix products are not computed. It runs over one row and over two, and everything is linear in the
rows; if a block has an argument that is not, as a mask over the patches of all images, it runs over three, and everything is quadratic. The
blocks run on the meta device, as those of the decoder do.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from math import comb
from operator import add, le, sub
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from horizon_lm.common.units import Unit
from horizon_lm.model.block_template import structure_key
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.skeletons import meta_copy
from horizon_lm.planning.arithmetic.outline import BlockKind, Footprint, ImageCosts, Linear, Work
from horizon_lm.planning.measure.block_probe import BlockRun, output_on_meta, run_on_meta
from horizon_lm.planning.measure.meta_recorder import Recorder
from horizon_lm.planning.measure.pass_trial import PassTrial

Call = Mapping[str, Any]  # the arguments of a model, by name


@dataclass(frozen=True, slots=True, eq=False)
class RowsWithImages:
    """The images of the rows of a plan.

    Attributes:
        per_row: images of a row.
        call: function from a number of equal rows to the arguments of the model for them, each with all of its images or some of them.
        tokens: tokens of each of these rows that stand for images.
        modal: names of the arguments that are for images alone.
        note: as in `ImageCosts`.
        repeats: number of times that a row of the plan has the images of one of these.
    """

    per_row: int
    call: Callable[[int], Call]
    tokens: int
    modal: frozenset[str]
    note: str = ""
    repeats: int = 1


def rows_with_images(
    per_row: int, tokens: Sequence[Sequence[int]], images_of: Callable[[torch.Tensor, torch.Tensor], Call], note: str = "",
    repeats: int = 1,
) -> RowsWithImages:  # fmt: skip
    """Return rows of a plan.

    Args:
        per_row: images of a row.
        tokens: the tokens of each image that is known: of all images of a row, or of one that stands for all.
        images_of: function from the ids and the mask of rows with these images, (rows, T), to the arguments for images.
        note: as in `ImageCosts`.
        repeats: as in `RowsWithImages`.
    """

    def call(rows: int) -> Call:
        ids = torch.tensor([[0, *(token for image in tokens for token in (*image, 0))]] * rows)
        mask = torch.ones_like(ids)
        mask[0, -1] = 0  # a padded token lets transformers make a mask
        return {"input_ids": ids, "attention_mask": mask, **images_of(ids, mask)}

    names = [name for name in call(1) if not name.endswith(("token_type_ids", "input_ids", "attention_mask"))]
    return RowsWithImages(per_row, call, sum(map(len, tokens)), frozenset(names), note, repeats)


@dataclass(slots=True)
class _Run:
    """A trial of the code around the blocks, and what it has taken.

    Attributes:
        units, differentiated: as from `PassTrial.run`.
        calls: arguments of the blocks of towers, on the meta device.
        hidden: bytes of the hidden states that these blocks, and the first one of the decoder, get.
        live: bytes of all tensors when these blocks compute, without their hidden states.
        history: the operations, and the bytes of all tensors after each.
        grads: bytes of the gradients of weights outside of blocks, which are kept until all blocks are differentiated.
        forward, backward: work.
    """

    units: tuple[Unit, ...] = ()
    differentiated: frozenset[int] = frozenset()
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    hidden: dict[int, int] = field(default_factory=dict)
    live: dict[int, int] = field(default_factory=dict)
    history: list[tuple[str, int]] = field(default_factory=list)
    grads: int = 0
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)


def image_costs(
    parts: ModelParts, images: RowsWithImages, dtype: torch.dtype, accelerated: bool
) -> tuple[ImageCosts, list[BlockKind], int]:
    """Return the costs of images, the blocks of towers with their costs, and the first block of the decoder with a gradient.

    Args:
        parts: parts of a skeleton.
        images: the images of rows.
        dtype: dtype of hidden states.
        accelerated: assume the kernels of a GPU.
    """
    copies: dict[Any, nn.Module] = {}  # a block on the meta device, by structure
    repeats, decoder = images.repeats, parts.decoder_blocks.start
    calls = [images.call(rows) for rows in (1, 2)]
    runs = [_run(parts, call, dtype, copies) for call in calls]
    if any(_is_quadratic(*(run.calls[index] for run in runs)) for index in runs[0].calls):
        calls.append(images.call(3))
        runs.append(_run(parts, calls[2], dtype, copies))
    texts = [_run(parts, _without(call, images.modal), dtype, copies) for call in calls]
    pixels = [_num_bytes(call[name] for name in images.modal) for call in calls]
    held = [run.live[decoder] - text.live[decoder] + num for run, text, num in zip(runs, texts, pixels, strict=True)]
    live = [map(add, moment, pixels) for moment in _largest([run.history for run in runs])]
    first = runs[0]
    kinds = [
        _kind(parts, indices, runs, repeats, dtype, accelerated)
        for indices in _alike(parts, first)
    ]  # fmt: skip
    idle = [index for index in range(decoder) if index not in first.calls]
    costs = ImageCosts(
        per_row=images.per_row, tokens=repeats * images.tokens, patches=repeats * max(map(_patches, first.calls.values()), default=0),
        order=first.units, differentiated=frozenset(index for index in first.differentiated if index < decoder),
        pixels=_of_rows(pixels, repeats), held=_of_rows(held, repeats), live=[_of_rows(moment, repeats) for moment in live],
        forward=_of_rows((run.forward for run in runs), repeats), backward=_of_rows((run.backward for run in runs), repeats),
        note=images.note,
    )  # fmt: skip
    differentiated = [index for index in first.differentiated if index >= decoder]
    return costs, [*kinds, *([BlockKind.idle(idle)] if idle else [])], min(differentiated, default=parts.num_blocks)


def _run(parts: ModelParts, call: Call, dtype: torch.dtype, copies: dict[Any, nn.Module]) -> _Run:
    """Run the code around the blocks on a batch, forward and backward, and measure it."""
    found, reached = _Run(), list[torch.Tensor]()

    def output_of(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = parts.blocks[index]
        kind = copies.setdefault(structure_key(module), meta_copy(module))
        work = recorder.work
        output = output_on_meta(kind, args, kwargs, dtype, parts.in_float32_inside(parts.block_names[index]))
        recorder.work = work  # without that of the block
        return output

    def watch(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        if index > parts.decoder_blocks.start:
            return
        found.hidden[index] = hidden.nbytes
        found.live[index], found.forward = recorder.live - hidden.nbytes, recorder.work
        if index == parts.decoder_blocks.start:
            reached.append(hidden)
        else:
            found.calls[index] = pytree.tree_map(_on_meta, (args, kwargs))

    outer = PassTrial(parts, partial(parts.model, use_cache=False), dtype, torch.device("cpu"), output_of, watch=watch)
    with torch.random.fork_rng(devices=[]), _History((call, list(parts.model.buffers())), "cpu") as recorder:
        found.units, found.differentiated = outer.run(call)
        if reached[0].requires_grad:
            torch.autograd.backward(reached[0], torch.zeros_like(reached[0]))
    found.grads = _num_bytes(outer.grads)
    found.history, found.backward = recorder.history, recorder.work - found.forward
    return found


class _History(Recorder):
    """A recorder that remembers each operation, and the bytes in use after it."""

    def __init__(self, given: Any, device: str) -> None:
        super().__init__(given, device)
        self.history: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.history.append((str(func), self.live))
        return result


def _largest(histories: Sequence[Sequence[tuple[str, int]]]) -> list[tuple[int, ...]]:
    """Return the bytes in use at moments of a pass, for one row, for two, and so on. Each is the largest for some number of rows.

    Most bytes grow with the rows, but gradients of weights do not, so the largest number for a few rows may be small for many.

    Args:
        histories: the operations of passes with one row, with two, and so on, and the bytes in use after each. Some code has operations
            for each image, so later lists may have more. What they have between two operations of all passes is one moment.
    """
    names = [[name for name, _ in history] for history in histories]
    others = [dict(_matches(names[0], each)) for each in names[1:]]
    common = [index for index in range(len(names[0])) if all(index in each for each in others)]
    starts, moments = [0] * len(histories), set[tuple[int, ...]]()
    for index in common:
        ends = [index + 1, *(each[index] + 1 for each in others)]
        spans = zip(histories, starts, ends, strict=True)
        moments.add(tuple(max(num for _, num in history[start:end]) for history, start, end in spans))
        starts = ends
    largest: list[tuple[int, ...]] = []
    # By their growth with the rows, from the largest on: another moment counts only if no larger one grows as much.
    for growth, moment in sorted(((_differences(each), each) for each in moments), reverse=True):
        if not any(all(map(le, growth, _differences(each))) for each in largest):
            largest.append(moment)
    return largest


def _matches(one: Sequence[str], other: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the indices of operations that two passes have in the same order."""
    for first, second, size in SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks():
        yield from zip(range(first, first + size), range(second, second + size), strict=True)


def _differences(values: tuple[int, ...]) -> tuple[int, ...]:
    """Return the differences of the highest order between values, then of lower ones, and last the first value."""
    if len(values) == 1:
        return values
    return (*_differences(tuple(map(sub, values[1:], values))), values[0])


def _without_decrease(values: Sequence[int]) -> list[int]:
    """Return the values for one row, for two, and so on, of a function that is no smaller for any number of rows, and neither negative nor
    decreasing: a mask may make more bytes for many rows than for few.
    """
    parts = _differences(tuple(values))[::-1]  # of the function: constant, linear, quadratic
    return [sum(comb(rows, order) * max(0, part) for order, part in enumerate(parts)) for rows in range(len(values))]


def _alike(parts: ModelParts, run: _Run) -> list[list[int]]:
    """Return the indices of the blocks of towers that were called, in lists of blocks of one structure with equal arguments."""
    alike: dict[Any, list[int]] = {}
    for index, call in run.calls.items():
        shapes = [_described(leaf) for leaf in pytree.tree_leaves(call)]
        key = structure_key(parts.blocks[index]), str(shapes), index in run.differentiated
        alike.setdefault(key, []).append(index)
    return list(alike.values())


def _kind(
    parts: ModelParts, indices: Sequence[int], runs: Sequence[_Run], repeats: int, dtype: torch.dtype, accelerated: bool
) -> BlockKind:
    """Measure blocks of towers that are alike, and return their costs as functions of the rows."""
    first = indices[0]
    block, in_float32 = meta_copy(parts.blocks[first]), parts.in_float32_inside(parts.block_names[first])
    measured = [run_on_meta(block, *run.calls[first], dtype, accelerated, in_float32) for run in runs]
    # What the code around these blocks keeps only until the decoder begins, such as the output of each block.
    decoder = parts.decoder_blocks.start
    beside = _without_decrease([max(run.live[index] for index in indices) - run.live[decoder] for run in runs])
    hidden = _of_rows((run.hidden[first] for run in runs), repeats)
    peaks = [each.forward_peak + num for each, num in zip(measured, beside, strict=True)]
    forward = _of_rows((each.forward for each in measured), repeats)
    if first not in runs[0].differentiated:  # there is no graph, and the input is no boundary
        nothing = Linear(Work(), Work())
        inputs = [num + run.hidden[first] for num, run in zip(peaks, runs, strict=True)]
        footprint = _of_rows((Footprint(num, num) for num in inputs), repeats)
        return BlockKind(indices, footprint, _of_rows(peaks, repeats), forward, nothing, nothing, hidden=hidden)
    footprints = [_beside(each, num + run.grads) for each, num, run in zip(measured, beside, runs, strict=True)]
    return BlockKind(
        indices, _of_rows(footprints, repeats), _of_rows(peaks, repeats), forward,
        _of_rows((each.recompute for each in measured), repeats), _of_rows((each.backward for each in measured), repeats), hidden=hidden,
    )  # fmt: skip


def _is_quadratic(one: Any, two: Any) -> bool:
    """Return whether an argument of a block grows faster than the images, given the arguments for one row and for two."""
    of_one, of_two = (
        [leaf for leaf in pytree.tree_leaves(each) if isinstance(leaf, torch.Tensor)] for each in (one, two)
    )
    return any(more.numel() > 2 * num.numel() for num, more in zip(of_one, of_two, strict=False))


def _beside(run: BlockRun, num_bytes: int) -> Footprint:
    """Return the footprint of a block, beside which there are other bytes."""
    return Footprint(run.footprint.graph, run.footprint.peak + num_bytes)


def _of_rows(values: Iterable[Any], repeats: int) -> Any:
    """Return a quantity as a function of the number of rows, each of which has ``repeats`` calls with images, from its values for one call,
    for two, and so on.
    """
    numbers = list(values)
    of_calls = Linear(*numbers)
    return Linear(*(of_calls.at(repeats * rows) for rows in range(1, len(numbers) + 1)))


def _without(call: Call, names: frozenset[str]) -> Call:
    return {name: value for name, value in call.items() if name not in names}


def _num_bytes(values: Any) -> int:
    return sum(each.nbytes for each in pytree.tree_leaves(list(values)) if isinstance(each, torch.Tensor))


def _patches(call: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    """Return the tokens of the hidden states of a block."""
    args, kwargs = call
    hidden = args[0] if args else kwargs["hidden_states"]
    return hidden.numel() // hidden.shape[-1]


def _described(leaf: Any) -> Any:
    """Return what the cost of a block depends on in an argument: the shape of a tensor, and the values of the bounds of images."""
    if not isinstance(leaf, torch.Tensor):
        return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf)
    return leaf.tolist() if _is_bounds(leaf) else (leaf.shape, leaf.dtype)


def _is_bounds(leaf: torch.Tensor) -> bool:
    return leaf.ndim == 1 and leaf.dtype == torch.int32


def _on_meta(leaf: Any) -> Any:
    """Return a tensor on the meta device in place of another one, unless it has the bounds of images, whose values are read."""
    if not isinstance(leaf, torch.Tensor) or _is_bounds(leaf):
        return leaf
    return torch.empty_like(leaf, device="meta").requires_grad_(leaf.requires_grad)
