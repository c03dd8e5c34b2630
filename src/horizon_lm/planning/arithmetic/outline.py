"""A model as seen by the planner: sizes of its units and costs of their computations, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, sub
from typing import Any, Generic, Self, TypeVar

from horizon_lm.common.units import EMBED, Unit, block
from horizon_lm.memory.layout.model import ModelLayout
from horizon_lm.memory.layout.units import StorageLayout


class _Amounts:
    """Base of dataclasses with slots whose fields are added, subtracted and multiplied one by one."""

    __slots__: tuple[str, ...] = ()

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(add, self._values(), other._values()))

    def __sub__(self, other: Self) -> Self:
        return type(self)(*map(sub, self._values(), other._values()))

    def __mul__(self, factor: float) -> Self:
        return type(self)(*(value * factor for value in self._values()))

    def _values(self) -> list[Any]:
        return [getattr(self, name) for name in self.__slots__]  # astuple takes ten times as long


@dataclass(frozen=True, slots=True)
class Footprint(_Amounts):
    """Memory of one computation of a block in bytes, without its weights, gradient slots and inputs.

    Attributes:
        graph: activations kept for a later backward pass, including outputs.
        peak: peak of the forward and backward pass.
        experts: peak of the experts if they are computed tile by tile, apart from the block; 0 otherwise.
        held: bytes that the block holds while its experts are computed, for each micro-batch.
        casts: bytes of the weights that are cast to FP8, once for all micro-batches. A kept graph keeps half of them.
    """

    graph: int
    peak: int
    experts: int = 0
    held: int = 0
    casts: int = 0

    def with_tile(self, expert_bytes: int) -> Self:
        """Return the footprint with a tile of experts whose gradients take these bytes."""
        return replace(self, experts=self.experts + expert_bytes)


@dataclass(frozen=True, slots=True)
class Work(_Amounts):
    """The cost of a computation, summed over its operations.

    Attributes:
        products: operations of matrix products (2 for each multiply-add), without those in FP8.
        product_bytes: bytes read and written by matrix products.
        attention: operations of fused attention kernels.
        moved_bytes: bytes read and written by all other operations.
        num_ops: number of operations that launch a kernel.
        float8: operations of matrix products in FP8.
    """

    products: float = 0.0
    product_bytes: float = 0.0
    attention: float = 0.0
    moved_bytes: float = 0.0
    num_ops: float = 0.0
    float8: float = 0.0


T = TypeVar("T", int, Footprint, Work)


@dataclass(frozen=True, slots=True)
class Linear(Generic[T]):
    """A quantity that is linear in the number of rows (or tokens), given by its values for one and for two.

    With a value for three it is quadratic, as of towers whose patches attend over the images of all rows, and the number must be whole.
    """

    one: T
    two: T
    three: T | None = None

    def at(self, rows: float) -> T:
        """Return the quantity for this number of rows or tokens."""
        value = self.one + (self.two - self.one) * (rows - 1)  # type: ignore[operator]
        if self.three is not None:
            value += (self.three - self.two - self.two + self.one) * ((rows - 1) * (rows - 2) // 2)  # type: ignore[operator]
        return value  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class CoreCosts:
    """The costs of a block whose experts are computed tile by tile, apart from it.

    Attributes:
        count: number of experts.
        grad: bytes of the largest gradient of a weight of one expert; 0 if none is trained.
        footprint: bytes, without the gradients of experts.
        before: work of a forward pass up to the experts.
        forward, recompute, backward: work as in `BlockKind`, without the experts.
    """

    count: int
    grad: int
    footprint: Linear[Footprint]
    before: Linear[Work]
    forward: Linear[Work]
    recompute: Linear[Work]
    backward: Linear[Work]


@dataclass(frozen=True, slots=True)
class BlockKind:
    """Blocks of one structure, with their costs for one device micro-batch.

    Attributes:
        indices: indices of these blocks.
        footprint: bytes of whole blocks.
        forward_peak: peak bytes of a forward pass without a graph.
        forward, recompute, backward: work of a forward pass, of computing it again for its graph, without products that nobody reads,
            and of a backward pass with an existing graph.
        core: the costs without experts; None if the experts cannot be cut into tiles.
        casts: work of casting weights to FP8 for a forward and a backward pass, once for all micro-batches.
        hidden: bytes of the input of a tower's block; None for blocks of the decoder, which get hidden states (B, T, H), and of towers
            that are not computed.
    """

    indices: Sequence[int]
    footprint: Linear[Footprint]
    forward_peak: Linear[int]
    forward: Linear[Work]
    recompute: Linear[Work]
    backward: Linear[Work]
    core: CoreCosts | None = None
    casts: Work = Work()
    hidden: Linear[int] | None = None

    @classmethod
    def idle(cls, indices: Sequence[int]) -> Self:
        """Return blocks that cost nothing."""
        nothing, no_work = Linear(0, 0), Linear(Work(), Work())
        return cls(indices, Linear(Footprint(0, 0), Footprint(0, 0)), nothing, no_work, no_work, no_work)

    def footprint_with(self, rows: int, tile: int | None) -> Footprint:
        """Return the footprint of one of these blocks.

        Args:
            rows: rows of the micro-batch.
            tile: number of experts in a tile; None for whole blocks.
        """
        if self.core is None or tile is None:
            return self.footprint.at(rows)
        return self.core.footprint.at(rows).with_tile(min(tile, self.core.count) * self.core.grad)


@dataclass(frozen=True, slots=True)
class HeadCosts:
    """Costs of norm, head and loss as functions of the number of tokens.

    Attributes:
        peak: peak bytes.
        forward, backward: work. The weights are read once, regardless of the number of tokens.
    """

    peak: Linear[int]
    forward: Linear[Work]
    backward: Linear[Work]


@dataclass(frozen=True, slots=True)
class ImageCosts:
    """The images of rows, and the costs of the code that reads them around the blocks of towers, for any number of rows.

    Attributes:
        per_row: images of a row.
        tokens: tokens of a row that stand for its images.
        patches: tokens of these images in the blocks of towers, before any of them are merged.
        order: the embedding and the blocks in the order in which a pass computes them.
        differentiated: the blocks of towers through which gradients flow.
        pixels: bytes of the tensors of images in a batch.
        held: bytes that this code keeps throughout a step, pixels among them.
        live: bytes that are in use at different moments while this code computes; each may be the largest for some number of rows.
        forward, backward: work of this code.
        note: what had to be assumed about the images; empty if nothing.
    """

    per_row: int
    tokens: int
    patches: int
    order: tuple[Unit, ...]
    differentiated: frozenset[int]
    pixels: Linear[int]
    held: Linear[int]
    live: Sequence[Linear[int]]
    forward: Linear[Work]
    backward: Linear[Work]
    note: str = ""

    def peak(self, rows: int) -> int:
        """Return the peak bytes of this code beside what it keeps."""
        return max(0, max(each.at(rows) for each in self.live) - self.held.at(rows))


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """A causal language model for sequences of one length in one dtype.

    Attributes:
        name: display name.
        layout: the units, for one rank.
        active: number of parameters used per token: no table lookups, and only the experts that a token is routed to.
        experts: number of experts of a block; 0 without a mixture of experts.
        routed_tokens: the largest number of tokens of which a pass without gradients streams only the experts that they are
            routed to.
        length: tokens of a sequence, T.
        compute_bytes: bytes of an element on the device.
        kinds: structures of the blocks; each block has one structure.
        shared: bytes of the inputs shared by all blocks, such as masks and rotary tables.
        heads: costs of norm, head and loss, for the heads ``chunked`` and ``whole``, and ``compiled`` for a chunked head with
            compiled code.
        attention: name of the attention implementation.
        first_differentiated: the first block of the decoder with a gradient.
        has_adapters: blocks have adapters, which belong to the outer parameters.
        base_is_frozen: adapters are trained, and no weight of a block.
        in_bfloat16: the weights come in bfloat16, so units that are not trained need no low halves.
        trains_decoded: transformers trains the quantized base only after decoding all of it, as of FP8, MXFP4 and INT4.
        whole_head_only: reason why the loss cannot be computed in chunks of tokens; empty if it can.
        whole_batch_only: the batch must not be split into micro-batches, because the model was not proven with them.
        unproven: reason why the model may differ from plain autograd; empty if the two were compared.
        unknown: reason why computations could not be tried without weights, so that their costs are 0; empty if they
            could.
        images: the images of rows; None for rows of text.
    """

    name: str
    layout: ModelLayout[StorageLayout]
    active: int
    length: int
    compute_bytes: int
    kinds: Sequence[BlockKind]
    shared: Linear[int]
    heads: Mapping[str, HeadCosts]
    attention: str
    experts: int = 0
    routed_tokens: int = 0
    first_differentiated: int = 0
    has_adapters: bool = False
    base_is_frozen: bool = False
    in_bfloat16: bool = False
    trains_decoded: bool = False
    whole_head_only: str = ""
    whole_batch_only: bool = False
    unproven: str = ""
    unknown: str = ""
    images: ImageCosts | None = None

    @property
    def num_blocks(self) -> int:
        return self.layout.num_blocks

    @property
    def order(self) -> Sequence[Unit]:
        """The embedding and the blocks in the order in which a pass computes them."""
        if self.images is not None:
            return self.images.order
        return (EMBED, *map(block, range(self.layout.num_tower_blocks, self.num_blocks)))

    @property
    def differentiated(self) -> Sequence[int]:
        """The blocks through which gradients flow, in their order."""
        of_towers = sorted(self.images.differentiated) if self.images is not None else []
        return [*of_towers, *range(self.first_differentiated, self.num_blocks)]

    def kind(self, index: int) -> BlockKind:
        """Return the structure of a block."""
        return next(kind for kind in self.kinds if index in kind.indices)

    def footprints(self, rows: int, tile: int | None = None) -> Sequence[Footprint]:
        """Return the footprint of each block. The arguments are those of `BlockKind.footprint_with`."""
        of_blocks: dict[int, Footprint] = {}
        for kind in self.kinds:
            of_blocks |= dict.fromkeys(kind.indices, kind.footprint_with(rows, tile))
        return [of_blocks[index] for index in range(self.num_blocks)]

    def step_flops(self, tokens: int) -> float:
        """Return the model's operations in a training step of ``tokens``, without recomputation: three times the operations of a forward
        pass. With a frozen base, products with weights count only twice, because their gradients are not computed. Blocks of towers count
        once if they have no backward pass.
        """
        rows, of_towers, attention = tokens / self.length, 0.0, 0.0
        passes = 2.0 if self.base_is_frozen else 3.0
        for kind in self.kinds:
            work = kind.forward.at(rows) * len(kind.indices)
            if kind.hidden is None:
                attention += work.attention
            elif kind.indices[0] in self.differentiated:
                of_towers += 3.0 * (work.products + work.attention)
            else:
                of_towers += work.products + work.attention
        return passes * 2.0 * self.active * tokens + 3.0 * attention + of_towers
