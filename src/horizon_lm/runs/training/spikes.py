"""Report steps whose loss or gradient norm is far above its values in the steps before.

Both are noisy on a logarithmic scale, so a value is compared there: with the median of a window of recent steps, in units
of their median absolute deviation (MAD), which single outliers do not move. The window is that of OLMo-core's
SkipStepAdamW, which uses mean and standard deviation. In simulations with normal, lognormal, gamma and Student t noise (4
degrees of freedom), at most 1 step in 10,000 is reported, and 6 with a factor of 6.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.training.non_finite import shown_places
from horizon_lm.runs.training.part import Part

_WINDOW = 128  # steps
_FEWEST = 32  # steps before the first report by deviation
_FIRST_RATIO = 1000.0  # to the median, from which fewer steps suffice: no warm-up has it, and no model survives it
_FACTOR = 8.0  # robust standard deviations
# Smallest ratio to the median that is reported, even in a smooth run; the gradient norm of one short row often triples.
_LEAST_RATIO = {"loss": 1.5, "gradient norm": 4.0}
_MAD_TO_SIGMA = 1.4826  # of a normal distribution


class Spikes(Part):
    """The recent losses and gradient norms of a run. Only the first step of a spike is reported.

    Args:
        optimizer: has the gradient norm of a step.
        report: prints a line.
    """

    def __init__(self, optimizer: Any = None, report: Callable[[str], None] = print) -> None:
        self._optimizer, self._report = optimizer, report
        self._windows = {"loss": deque[float](maxlen=_WINDOW), "gradient norm": deque[float](maxlen=_WINDOW)}
        self._in_spike = dict.fromkeys(self._windows, False)  # the last value was part of a spike
        self._was_zero = False  # the last gradient norm

    def after_update(self, step: int, loss: float, batch: Batch) -> None:
        grad_norm = self._optimizer.grad_norm
        for spike in self.add(loss, grad_norm):
            self._report(f"step {step}: spike: {spike}. Its rows: {shown_places(batch)}")
        is_zero = grad_norm == 0
        if is_zero and not self._was_zero:
            self._report(
                f"step {step}: all gradients are zero, so nothing is learned; if the loss was far higher before, the learning rate "
                "has destroyed the model"
            )
        self._was_zero = is_zero

    def add(self, loss: float, grad_norm: float | None) -> list[str]:
        """Add the loss and the gradient norm of a step. Return a text for each of them with which a spike begins.

        Values that are not positive and finite are ignored.
        """
        values = {"loss": loss, "gradient norm": grad_norm}
        texts = [self._add_value(name, value) for name, value in values.items()]
        return [text for text in texts if text]

    def _add_value(self, name: str, value: float | None) -> str:
        """Add a value. Return a text if a spike begins with it; empty if it is not far above those before, or the last one was, too."""
        if value is None or not 0 < value < math.inf:
            return ""
        window, was_in_spike = self._windows[name], self._in_spike[name]
        logs = list(window)
        window.append(math.log(value))
        if not logs:
            return ""
        median = statistics.median(logs)
        if len(logs) < _FEWEST:
            threshold = math.log(_FIRST_RATIO)
        else:
            sigma = _MAD_TO_SIGMA * statistics.median(abs(each - median) for each in logs)
            threshold = max(_FACTOR * sigma, math.log(_LEAST_RATIO[name]))
        self._in_spike[name] = window[-1] - median > threshold
        if was_in_spike or not self._in_spike[name]:
            return ""
        usual = math.exp(median)
        return f"the {name} {value:.4g} is {value / usual:.3g} times the median of the {len(logs)} steps before ({usual:.4g})"

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON."""
        return {name: {"logs": list(self._windows[name]), "inside": self._in_spike[name]} for name in self._windows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`."""
        for name, window in self._windows.items():
            window.clear()
            window.extend(state[name]["logs"])
            self._in_spike[name] = state[name]["inside"]
