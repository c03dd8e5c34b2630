"""The scaling of Llama 3.1 from its factors: a GGUF file has the factor of each frequency, and not the settings that they follow from.

A frequency f turns ``t = original * f / 2 pi`` times in the original context. It is divided by ``factor`` if t is below
``low_freq_factor``, and by 1 if t is above ``high_freq_factor``; between them, 1 / divisor is a straight line in t. Only the ratios of
the original context and of the two limits follow from the factors.
"""

import math
from collections.abc import Sequence
from typing import Any

_PRECISION = 1e-6  # of factors, which are computed in float32
_LIMITS = (1.0, 4.0)  # of Llama 3.1, and of all models after it


def scaling_of(factors: Sequence[float], frequencies: Sequence[float]) -> dict[str, Any] | None:
    """Return the rotary parameters that divide frequencies by these factors; None if no parameters do.

    Args:
        factors: divisors of the frequencies.
        frequencies: the frequencies without scaling, from high to low.
    """
    largest = _rounded(max(factors, default=0.0))
    if len(factors) != len(frequencies) or not largest >= 1.0:  # also NaN
        return None
    if min(factors) * (1 + _PRECISION) >= largest:
        return {"rope_type": "linear", "factor": largest} if largest > 1.0 else {}
    usual = [(2**exponent, *_LIMITS) for exponent in range(5, 21)]
    for original, low, high in (*usual, *_candidates(factors, frequencies, largest)):
        scaling = {
            "factor": largest,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
        if _gives_factors(scaling, factors, frequencies):
            return {"rope_type": "llama3", **scaling}
    return None


def _candidates(
    factors: Sequence[float], frequencies: Sequence[float], largest: float
) -> list[tuple[int, float, float]]:
    """Return candidates for the original context, the low and the high limit; first those with round numbers. Empty if there are none.

    The share of the frequency without scaling is 0 up to the low limit, 1 from the high limit on, and a straight line, the ramp, between
    them. Two frequencies on the ramp determine the line. With fewer of them, a limit is taken from the nearest frequency beside the ramp.
    """
    turns = [frequency / (2 * math.pi) for frequency in frequencies]  # for each token of a context
    shares = [(1 / factor - 1 / largest) / (1 - 1 / largest) for factor in factors]  # of the frequency without scaling
    # Shares within 1e-4 of 0 and 1 count as these, because factors are rounded to float32.
    ramp = [(t, share) for t, share in zip(turns, shares, strict=True) if 1e-4 < share < 1 - 1e-4]
    below = max((t for t, share in zip(turns, shares, strict=True) if share <= 1e-4), default=turns[-1] / 2)
    above = min((t for t, share in zip(turns, shares, strict=True) if share >= 1 - 1e-4), default=2 * turns[0])
    if len(ramp) >= 2:
        (first, start), (last, end) = ramp[-1], ramp[0]  # with the fewest turns, and with the most
        slope = (end - start) / (last - first)
        low, high = first - start / slope, last + (1 - end) / slope
    elif ramp:
        point, share = ramp[0]
        low, high = below, below + (point - below) / share
        if high > above:
            low, high = (point - share * above) / (1 - share), above
    else:
        low, high = below, above
    if not 0 < low < high:
        return []
    unit = round(1 / low)  # the context in which the low limit is one turn, as it is in Llama 3.1
    return [
        (unit, 1.0, round(unit * high, 2)),
        (unit, _rounded(unit * low), _rounded(unit * high)),
        (unit, unit * low, unit * high),
    ]


def _gives_factors(scaling: dict[str, Any], factors: Sequence[float], frequencies: Sequence[float]) -> bool:
    """Return whether the divisors of a scaling are the factors, in the precision of float32."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    for factor, frequency in zip(factors, frequencies, strict=True):
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisor = 1 / ((1 - share) / scaling["factor"] + share)
        if not math.isclose(divisor, factor, rel_tol=_PRECISION):
            return False
    return True


def _rounded(value: float) -> float:
    """Return a number without the digits that float32 does not have."""
    return float(f"{value:.6g}")
