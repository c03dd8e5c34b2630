"""What machines do in a second, and what the operations of a step ask of them.

Figures are published ones, and shares of them that are assumed to be usable; nothing here was measured.
"""

from dataclasses import dataclass

from horizon_lm.schedule.ops import EMBED, HEAD, OUTER, UPDATES, Buf, Kind, Op, Stream
from horizon_lm.schedule.simulate import Cost, Rates

# Host traffic of an update, in bytes per parameter: read the gradient (2), read and write fp32 moments (8 + 8) and the
# weight (2 + 2), which in fp32_master has 16 low bits more (2 + 2).
UPDATE_BYTES = {"fp32_master": 26, "bf16": 22}
WEIGHT_BYTES = 2  # a parameter, or its gradient, on the link

SUSTAINED = 0.61
"""Share of the dense bf16 peak that a whole step is assumed to sustain: 600 of an H200's 989 TFLOP/s. Large matrix
products alone do better; norms, attention and launches take the rest."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine with one accelerator.

    Attributes:
        flops: sustained operations per second in bf16.
        link: bytes per second from host to device, and at the same time as many back.
        host: bytes per second of host memory, read and written together.
        sources: where each figure comes from.
    """

    name: str
    flops: float
    link: float
    host: float
    sources: str

    @property
    def rates(self) -> Rates:
        return Rates(self.link, self.link, self.host)


H200_SERVER = Hardware(
    "H200 server",
    flops=SUSTAINED * 989e12,
    link=55e9,
    host=200e9,
    sources="NVIDIA H200 datasheet: 1,979 bf16 TFLOP/s with sparsity, so 989 dense; PCIe 5.0 x16: 63 GB/s each way by "
    "specification, 55 assumed usable; one socket Xeon Platinum 8480+ with eight channels of DDR5-4800: 307 GB/s by "
    "specification, 200 assumed usable",
)
RTX_4090_DESKTOP = Hardware(
    "RTX 4090 desktop",
    flops=SUSTAINED * 165.2e12,
    link=25e9,
    host=70e9,
    sources="NVIDIA Ada architecture whitepaper: 165.2 bf16 TFLOP/s dense with fp32 accumulation; PCIe 4.0 x16: 31.5 GB/s "
    "each way by specification, 25 assumed usable; two channels of DDR5-5600: 89.6 GB/s by specification, 70 assumed "
    "usable",
)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A dense decoder.

    Attributes:
        block, head, table, outer: parameters of one block, the output projection (the table's, when tied), the embedding
            table, and everything else.
        hidden, vocabulary: columns and rows of the table.
        attention: width of attention, query heads times their dimension.
    """

    num_blocks: int
    block: int
    head: int
    table: int
    outer: int
    hidden: int
    vocabulary: int
    attention: int

    @property
    def num_parameters(self) -> int:
        """All that an optimizer updates, of an untied model."""
        return self.num_blocks * self.block + self.head + self.table + self.outer

    @property
    def num_active(self) -> int:
        """Parameters that a token is multiplied with."""
        return self.num_blocks * self.block + self.head

    def of(self, unit: str) -> int:
        """Parameters of a unit."""
        return {EMBED: self.table, HEAD: self.head, OUTER: self.outer}.get(unit, self.block)


def _qwen2_block(hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Query, key and value have a bias; three matrices in the MLP; two norms."""
    projections = (hidden + 1) * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden
    return projections + 3 * hidden * intermediate + 2 * hidden


# The shape in the config.json of Qwen2.5-7B, 7,615,616,512 parameters.
QWEN25_7B = Decoder(
    num_blocks=28,
    block=_qwen2_block(3584, 18944, heads=28, kv_heads=4, head_dim=128),
    head=152064 * 3584,
    table=152064 * 3584,
    outer=3584,  # the final norm
    hidden=3584,
    vocabulary=152064,
    attention=28 * 128,
)


@dataclass(frozen=True, slots=True)
class Step:
    """A training step of a dense decoder.

    Attributes:
        tokens: of the step, T.
        length: of a sequence.
        precision: a key of `UPDATE_BYTES`.
    """

    model: Decoder
    tokens: int
    length: int
    precision: str = "fp32_master"

    @property
    def num_rows(self) -> int:
        """Rows of the table that the step reads: as many as there can be, if no token comes twice."""
        return min(self.tokens, self.model.vocabulary)

    def flops(self, op: Op) -> float:
        """Operations of a computation in products with N parameters, attention apart.

        2·N·T forward, 4·N·T backward, and a backward computes its forward again. A head that makes its gradients in the
        forward does so once, and has them scaled in the backward.
        """
        if op.kind not in (Kind.FORWARD, Kind.BACKWARD) or op.unit in (EMBED, OUTER):
            return 0.0
        product = 2.0 * self.model.of(op.unit) * self.tokens
        touched = {buffer.kind for buffer in op.reads + op.writes}
        if op.kind == Kind.FORWARD:
            return 3 * product if Buf.HEAD_GRADS in touched else product
        scales_only = op.unit == HEAD and Buf.HEAD not in touched
        return 0.0 if scales_only else 3 * product

    def attention_flops(self, op: Op) -> float:
        """Operations of causal attention in a block: half of the 4·T·length·width of scores and weighted values.

        Backward: the forward again, and 2.5 times as much (Dao, "FlashAttention-2", arXiv 2307.08691, section 4.1).
        """
        if op.kind not in (Kind.FORWARD, Kind.BACKWARD) or op.unit in (EMBED, HEAD, OUTER):
            return 0.0
        forward = 2.0 * self.tokens * self.length * self.model.attention
        return forward if op.kind == Kind.FORWARD else 3.5 * forward

    def num_bytes(self, op: Op) -> float:
        """Bytes over the link of a transfer, and host traffic of an update."""
        rows = self.num_rows * self.model.hidden
        parameters = self.model.of(op.unit)
        if op.kind in UPDATES:
            if op.unit == EMBED:  # the rows that the batch reads come first, then the others
                parameters = rows if op.kind == Kind.UPDATE_ROWS else parameters - rows
            return float(parameters * UPDATE_BYTES[self.precision])
        if op.kind in (Kind.OFFLOAD, Kind.FETCH):
            return float(self.tokens * self.model.hidden * WEIGHT_BYTES)
        return float((rows if op.unit == EMBED else parameters) * WEIGHT_BYTES)

    def cost(self, hardware: Hardware) -> Cost:
        """Costs for `schedule.simulate` on a machine."""

        def cost(op: Op) -> float:
            if op.stream == Stream.COMPUTE:
                return (self.flops(op) + self.attention_flops(op)) / hardware.flops
            return self.num_bytes(op)

        return cost


def hiding_tokens(hardware: Hardware, model: Decoder, precision: str, update_in_backward: bool = False) -> float:
    """Tokens per step from which updates hide behind computation (architecture, 3.5).

    Updates move b bytes for each of N_total parameters, at B bytes per second; the forward that hides them executes 2
    operations for each of N_active parameters and each token, at R per second:

        b·N_total / B <= 2·N_active·T / R,  so  T >= b/2 · R/B · N_total/N_active

    which is 13·R/B in ``fp32_master`` and 11·R/B in ``bf16``, times the ratio. With ``update_in_backward`` they hide behind
    the backward instead, which executes 6: a third of the tokens.
    """
    per_token = 6 if update_in_backward else 2
    ratio = model.num_parameters / model.num_active
    return UPDATE_BYTES[precision] / per_token * hardware.flops / hardware.host * ratio
