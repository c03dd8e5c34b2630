"""What stays on the device between a forward and its backward, as planned for batches up to some size."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class Residency:
    """What stays on the device between a forward and its backward, each for so many of the last blocks.

    Attributes:
        boundaries: inputs of blocks; those of earlier blocks wait in host memory.
        weights: these blocks are streamed in once after an update, not again for the backward.
        graphs: and these are not computed again either; at most as many as have boundaries and weights.
    """

    boundaries: int
    weights: int = 0
    graphs: int = 0


@dataclass(frozen=True, slots=True)
class BatchSize:
    """What of a batch decides how much memory a step takes.

    Attributes:
        tokens: rows times their length.
        length: of the rows.
        tokens_at_once: of one device micro-batch.
        is_masked: it has an attention mask.
    """

    tokens: int = 0
    length: int = 0
    tokens_at_once: int = 0
    is_masked: bool = False

    def covers(self, other: "BatchSize") -> bool:
        return self.together_with(other) == self

    def together_with(self, other: "BatchSize") -> "BatchSize":
        """The largest of each."""
        return BatchSize(*map(max, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class ExpectedBatch:
    """What is known of the batches to come.

    Attributes:
        tokens: of the largest one to train on: rows times their length. 0 if that is not known.
        distinct_tokens: that there are in all batches; None if that is not known.
    """

    tokens: int = 0
    distinct_tokens: int | None = None

    def table_rows(self, tokens: int, vocabulary: int) -> int:
        """Distinct rows of the embedding table that a batch of so many tokens reads at most."""
        return min(tokens, vocabulary, self.distinct_tokens or vocabulary)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What was planned for batches up to some size.

    Attributes:
        residency: what stays on the device.
        peak: bytes of device memory that a training step allocates at once: the engine's buffers exactly, what blocks and
            head need for a while as counted when it was planned.
    """

    residency: Residency
    peak: int

    def together_with(self, other: "DevicePlan") -> "DevicePlan":
        """For the batches of both."""
        residency = Residency(*map(min, astuple(self.residency), astuple(other.residency)))
        return DevicePlan(residency, max(self.peak, other.peak))
