"""Sums of squares of the gradients in host memory, kept up as they land."""

from collections.abc import Callable

from horizon_lm.device.moves import Squares


class GradSquares:
    """By unit, the sum of squares of its gradient slab as it is stored; unknown where somebody else may have written."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Squares]] = {}

    def landing(self, unit: str, whole: bool) -> Callable[[Squares], None]:
        """What reports of a landing go to: of the whole slab, or of a change to it."""
        if whole:
            self._sums[unit] = []
        sums = self._sums.get(unit)
        return (lambda value: None) if sums is None else sums.append

    def forget(self, unit: str) -> None:
        """The slab may be changed by others."""
        self._sums.pop(unit, None)

    def clear(self) -> None:
        self._sums.clear()

    def of(self, unit: str) -> float | None:
        """The sum, or None if it is unknown. Every landing must be finished."""
        sums = self._sums.get(unit)
        return None if sums is None else float(sum(float(value) for value in sums))
