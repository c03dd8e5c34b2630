"""The passes that are running."""

from dataclasses import dataclass

from horizon_lm.engine.passes.backward_pass import BackwardPass
from horizon_lm.engine.passes.forward_pass import ForwardPass


@dataclass(slots=True)
class Running:
    """The passes that are running: a forward pass, or the backward pass of a graph, or neither."""

    forward: ForwardPass | None = None
    backward: BackwardPass | None = None
