"""What becomes of a step with a gradient that is NaN or infinite."""

import warnings

from horizon_lm.errors import ConfigError, NonFiniteError, NonFiniteWarning

REMEDY = "Lower the learning rate, or look at the rows of this step."


class SkippedSteps:
    """Counts the steps that are left out, if any may be.

    Args:
        non_finite: ``raise`` or ``skip``.
        limit: of skipped steps in a row; None for none.

    Attributes:
        num: steps left out so far.
    """

    def __init__(self, non_finite: str, limit: int | None) -> None:
        if non_finite not in ("raise", "skip"):
            raise ConfigError(f"non_finite is {non_finite!r}; choose 'raise' or 'skip'")
        if limit is not None and limit < 1:
            raise ConfigError(f"max_consecutive_skips is {limit}; it must be at least 1, or None for no limit")
        self._skips, self._limit = non_finite == "skip", limit
        self.num = self._in_a_row = 0

    def skip(self, what: str) -> None:
        """Leave out a step with a NonFiniteWarning; raise NonFiniteError if it may not be left out."""
        if not self._skips:
            raise NonFiniteError(f"{what}; the weights are unchanged. {REMEDY}")
        if self._in_a_row == self._limit:
            raise NonFiniteError(
                f"{what}, and {self._limit} steps before it were skipped already, as many as max_consecutive_skips allows; the "
                f"weights are unchanged. {REMEDY}"
            )
        self.num += 1
        self._in_a_row += 1
        warnings.warn(f"{what}; this step was skipped", NonFiniteWarning, stacklevel=4)

    def applied(self) -> None:
        """Count a step that was not left out."""
        self._in_a_row = 0
