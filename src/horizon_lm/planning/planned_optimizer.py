"""An optimizer as the planner knows it: its moments, and the bytes that they take."""

from dataclasses import dataclass

from horizon_lm.layout.model import ModelLayout
from horizon_lm.layout.units import StorageLayout

MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "8bit": 1}  # bytes of each moment


@dataclass(frozen=True, slots=True)
class PlannedOptimizer:
    """The figures of an optimizer that a plan needs. An update reads and writes its moments once.

    Attributes:
        name: as in reports.
        num_moments: moments of each parameter.
        orthogonalizes: matrices of blocks have one moment, which is orthogonalized on the device.
    """

    name: str
    num_moments: int
    orthogonalizes: bool = False

    @property
    def moments_held(self) -> str:
        """The number of moments, as the end of a sentence about parameters."""
        if self.orthogonalizes:
            return "one of matrices, two of others"
        return f"{'one' if self.num_moments == 1 else 'two'} per parameter"

    @property
    def updates_in_backward(self) -> bool:
        """True if a unit can be updated during the backward pass: its matrices are not orthogonalized after it."""
        return not self.orthogonalizes

    def moment_bytes(self, moments: str) -> int:
        """Return the bytes of a parameter's moments, without the scales of 8-bit moments. If matrices have fewer moments than other
        parameters, these are those of a parameter in a matrix.
        """
        return (1 if self.orthogonalizes else self.num_moments) * MOMENT_BYTES[moments]

    def moments_of(self, layout: ModelLayout[StorageLayout]) -> list[frozenset[str]]:
        """Return the full names of the trained parameters that have each moment."""
        trained = layout.trained
        if not self.orthogonalizes:
            return [trained] * self.num_moments
        return [trained.intersection(layout.matrices), *[trained.difference(layout.matrices)] * self.num_moments]


ADAMW = PlannedOptimizer("AdamW", 2)
"""The optimizer that runs have by default, and that the seconds of an update are measured with."""
