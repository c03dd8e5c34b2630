"""Measure what the images of rows cost: in the blocks of towers, and in the model's code around them.

The code around the blocks runs on the CPU over rows with images, because the values of some arguments, such as the size of an
image, decide the shapes of others. Its matrix products are not computed. It runs over one row and over two, and everything has to be
linear in the rows. The blocks run on the meta device, as those of the decoder do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from horizon_lm.common.units import Unit
from horizon_lm.errors import ConfigError
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
        one, two: the arguments of the model for one row, and for two equal ones, each with all of its images or some of them.
        tokens: tokens of each of these rows that stand for images.
        modal: names of the arguments that are for images alone.
        note: as in `ImageCosts`.
        repeats: number of times that a row of the plan has the images of one of these.
    """

    per_row: int
    one: Call
    two: Call
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
    calls, modal = list[Call](), frozenset[str]()
    for rows in (1, 2):
        ids = torch.tensor([[0, *(token for image in tokens for token in (*image, 0))]] * rows)
        mask = torch.ones_like(ids)
        mask[0, -1] = 0  # a padded token lets transformers make a mask
        made = images_of(ids, mask)
        modal = frozenset(name for name in made if not name.endswith("token_type_ids"))
        calls.append({"input_ids": ids, "attention_mask": mask, **made})
    return RowsWithImages(per_row, calls[0], calls[1], sum(map(len, tokens)), modal, note, repeats)


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

    Raises:
        ConfigError: memory grows faster than the number of images.
    """
    copies: dict[Any, nn.Module] = {}  # a block on the meta device, by structure
    repeats, decoder = images.repeats, parts.decoder_blocks.start
    runs = [_run(parts, call, dtype, copies) for call in (images.one, images.two)]
    texts = [_run(parts, _without(call, images.modal), dtype, copies) for call in (images.one, images.two)]
    pixels = [_num_bytes(call[name] for name in images.modal) for call in (images.one, images.two)]
    held = [run.live[decoder] - text.live[decoder] + num for run, text, num in zip(runs, texts, pixels, strict=True)]
    first = runs[0]
    kinds = [
        _kind(parts, indices, runs, repeats, dtype, accelerated)
        for indices in _alike(parts, first)
    ]  # fmt: skip
    idle = [index for index in range(decoder) if index not in first.calls]
    costs = ImageCosts(
        per_row=images.per_row, tokens=repeats * images.tokens, patches=repeats * max(map(_patches, first.calls.values()), default=0),
        order=first.units, differentiated=frozenset(index for index in first.differentiated if index < decoder),
        pixels=_of_rows(pixels[0], pixels[1], repeats), held=_of_rows(held[0], held[1], repeats),
        live=[_of_rows(one + pixels[0], two + pixels[1], repeats) for one, two in _largest(runs[0].history, runs[1].history)],
        forward=_of_rows(runs[0].forward, runs[1].forward, repeats), backward=_of_rows(runs[0].backward, runs[1].backward, repeats),
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


def _largest(one: Sequence[tuple[str, int]], two: Sequence[tuple[str, int]]) -> list[tuple[int, int]]:
    """Return the bytes in use at moments of a pass, for one row and for two. Each is the largest for some number of rows.

    Most bytes grow with the rows, but gradients of weights do not, so the largest number for a few rows may be small for many.

    Args:
        one, two: the operations of a pass with one row and of one with two, and the bytes in use after each. Some code has operations
            for each image, so the second list may have more.
    """
    names = [name for name, _ in one], [name for name, _ in two]
    moments, constant, last = [(num, 2 * num) for _, num in one[:1]], 0, 0
    for first, second, size in SequenceMatcher(None, *names, autojunk=False).get_matching_blocks():
        # What was left out has as many bytes that do not grow as the operation before it.
        moments += [(constant + -(-(num - constant) // 2), num) for _, num in two[last:second]]
        pairs = zip(one[first : first + size], two[second : second + size], strict=True)
        moments += [(num, more) for (_, num), (_, more) in pairs]
        last = second + size
        if size:
            constant = max(0, 2 * moments[-1][0] - moments[-1][1])
    largest: list[tuple[int, int]] = []
    # By their growth with the rows, from the largest on: a moment with a smaller growth counts only if it has more bytes for one row.
    for moment in sorted(moments, key=lambda each: (each[1] - each[0], each[0]), reverse=True):
        if not largest or moment[0] > largest[-1][0]:
            largest.append(moment)
    return largest


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
    _require_linear(parts.block_names[first], *(run.calls[first] for run in runs))
    block, in_float32 = meta_copy(parts.blocks[first]), parts.in_float32_inside(parts.block_names[first])
    one, two = (run_on_meta(block, *run.calls[first], dtype, accelerated, in_float32) for run in runs)
    # What the code around these blocks keeps only until the decoder begins, such as the output of each block.
    decoder = parts.decoder_blocks.start
    beside = [max(0, max(run.live[index] for index in indices) - run.live[decoder]) for run in runs]
    hidden = _of_rows(runs[0].hidden[first], runs[1].hidden[first], repeats)
    peaks = _of_rows(one.forward_peak + beside[0], two.forward_peak + beside[1], repeats)
    forward = _of_rows(one.forward, two.forward, repeats)
    if first not in runs[0].differentiated:  # there is no graph, and the input is no boundary
        nothing = Linear(Work(), Work())
        inputs = Linear(peaks.one + hidden.one, peaks.two + hidden.two)
        footprint = Linear(Footprint(inputs.one, inputs.one), Footprint(inputs.two, inputs.two))
        return BlockKind(indices, footprint, peaks, forward, nothing, nothing, hidden=hidden)
    footprints = [_beside(each, num + run.grads) for each, num, run in zip((one, two), beside, runs, strict=True)]
    return BlockKind(
        indices, _of_rows(footprints[0], footprints[1], repeats), peaks, forward, _of_rows(one.recompute, two.recompute, repeats),
        _of_rows(one.backward, two.backward, repeats), hidden=hidden,
    )  # fmt: skip


def _require_linear(name: str, one: Any, two: Any) -> None:
    """Raise ConfigError if an argument of a block grows faster than the images, given the arguments for one image and for two."""
    of_one, of_two = (
        [leaf for leaf in pytree.tree_leaves(each) if isinstance(leaf, torch.Tensor)] for each in (one, two)
    )
    if any(more.numel() > 2 * num.numel() for num, more in zip(of_one, of_two, strict=False)):
        raise ConfigError(
            f"images_per_row: {name} takes a mask over the patches of all images, which grows with the square of their number, so its memory is "
            "not planned; plan rows of text, and leave room on the device"
        )


def _beside(run: BlockRun, num_bytes: int) -> Footprint:
    """Return the footprint of a block, beside which there are other bytes."""
    return Footprint(run.footprint.graph, run.footprint.peak + num_bytes)


def _of_rows(one: Any, two: Any, repeats: int) -> Any:
    """Return a quantity as a function of the number of rows, from its values for one call with images and for two, of which each row has
    ``repeats``.
    """
    of_calls = Linear(one, two)
    return Linear(of_calls.at(repeats), of_calls.at(2 * repeats))


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
