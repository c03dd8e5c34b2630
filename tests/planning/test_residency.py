"""What stays on the device of a residency that is too large for it."""

import pytest

from horizon_lm.planning.arithmetic.residency import ActivationMemory, Residency, lower_residency

NUM_BLOCKS, WEIGHTS, GRAPH, BOUNDARY, PEAK = 4, 100, 1000, 10, 2000
ACTIVATIONS = ActivationMemory(
    graphs=[GRAPH] * NUM_BLOCKS,
    peaks=[PEAK] * NUM_BLOCKS,
    backward_peaks=[PEAK - GRAPH] * NUM_BLOCKS,
    head=0,
    boundaries=[BOUNDARY] * NUM_BLOCKS,
    differentiated=frozenset(range(NUM_BLOCKS)),
)


def needed(residency: Residency) -> int:
    return ACTIVATIONS.step_peak(residency.boundaries, residency.graphs) + residency.weights * WEIGHTS


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (Residency(4, 3), [Residency(4, 3), Residency(3, 3), Residency(0, 3), Residency(4, 2), Residency(0, 2), Residency(4, 1)]),
        (Residency(1, 3), [Residency(1, 3), Residency(0, 3), Residency(1, 2)]),
        (Residency(0, 2), [Residency(0, 2), Residency(0, 1), Residency(0)]),
        (Residency(4, 3, 3), [Residency(4, 3, 3), Residency(3, 3, 3), Residency(4, 3, 2), Residency(3, 3, 2)]),
    ],
)  # fmt: skip
def test_a_residency_is_lowered_to_what_fits(chosen: Residency, expected: list[Residency]) -> None:
    """Boundaries are lowered first, then graphs, then weights."""
    for residency in expected:
        assert lower_residency(chosen, needed(residency), [WEIGHTS] * NUM_BLOCKS, ACTIVATIONS) == residency


def test_nothing_stays_where_nothing_fits() -> None:
    assert lower_residency(Residency(4, 3, 1), PEAK - 1, [WEIGHTS] * NUM_BLOCKS, ACTIVATIONS) == Residency(0)
