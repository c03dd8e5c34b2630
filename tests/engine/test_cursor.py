"""Which computations a pass may leave out is written in its schedule."""

from collections.abc import Sequence

import pytest

from horizon_lm.common.units import EMBED, HEAD, OUTER, Unit, block
from horizon_lm.device.cpu import CpuDevice
from horizon_lm.engine.passes.cursor import Cursor
from horizon_lm.errors import ScheduleMismatchError
from horizon_lm.schedule import between, build
from horizon_lm.schedule.ops import Kind, Schedule

LAYOUT = build.Layout(4)
BLOCKS = [block(index) for index in range(4)]
FORWARD = build.forward(LAYOUT, keeps=range(4))
BACKWARD = build.backward(LAYOUT, order=[EMBED, *BLOCKS], trainable=[EMBED, *BLOCKS, HEAD, OUTER])


def run(schedule: Schedule, kind: Kind, units: Sequence[Unit]) -> None:
    """Compute these units of a pass whose other operations move nothing."""
    cursor = Cursor(CpuDevice())
    cursor.start(schedule, lambda op: [])
    for unit in units:
        with cursor.compute(kind, unit):
            pass
    cursor.finish()


@pytest.mark.parametrize(
    "units",
    [
        [HEAD, *reversed(BLOCKS), EMBED, OUTER],
        [BLOCKS[1], BLOCKS[0], EMBED, OUTER],  # the loss depends on the hidden states of a block
        [HEAD, *reversed(BLOCKS), OUTER],  # no gradient reaches the embedding
        [HEAD, *reversed(BLOCKS)],
        [HEAD],
        [OUTER],
    ],
)
def test_backward_may_begin_anywhere_and_leave_out_embedding_and_outer_parameters(units: list[Unit]) -> None:
    run(BACKWARD, Kind.BACKWARD, units)


@pytest.mark.parametrize(
    ("schedule", "kind", "units", "expected"),
    [
        (BACKWARD, Kind.BACKWARD, [HEAD, BLOCKS[2]], "backward block3"),
        (BACKWARD, Kind.BACKWARD, [BLOCKS[3], BLOCKS[1]], "backward block2"),
        (BACKWARD, Kind.BACKWARD, [BLOCKS[1], OUTER], "backward block0"),
        (BACKWARD, Kind.BACKWARD, [BLOCKS[2], BLOCKS[3]], "backward block1"),
        (FORWARD, Kind.FORWARD, [EMBED], "forward outer"),
        (FORWARD, Kind.FORWARD, [OUTER, BLOCKS[0]], "forward embed"),
        (FORWARD, Kind.FORWARD, [OUTER, EMBED, BLOCKS[1]], "forward block0"),
        (between.update(LAYOUT, BLOCKS, BLOCKS), Kind.ORTHOGONALIZE, [BLOCKS[1]], "orthogonalize block0"),
    ],
)
def test_no_other_computation_may_be_left_out(schedule: Schedule, kind: Kind, units: list[Unit], expected: str) -> None:
    with pytest.raises(ScheduleMismatchError, match=expected):
        run(schedule, kind, units)
