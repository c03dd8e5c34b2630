"""Dropout outside of blocks, such as that of GPT-2's embedding: each micro-batch draws from its own random stream.

Blocks do the same, so a step drops the same values on any number of ranks, if it is cut into the same micro-batches.

Shapes: B batch rows; the other dimensions do not matter.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import nn

from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.lockstep import batched_call

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_Forward = Callable[[torch.Tensor], torch.Tensor]


def outer_dropouts(decoder: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the dropout modules of a decoder that are in none of its blocks."""
    inside = {id(module) for block in blocks for module in block.modules()}
    return [module for module in decoder.modules() if isinstance(module, _DROPOUTS) and id(module) not in inside]


class OuterDropout:
    """The forward method of the dropout modules outside of blocks.

    Args:
        engine: the engine of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def forward(self, module: "weakref.ref[nn.Module]", own: _Forward, hidden: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the module's own forward method for all micro-batches, put together.

        Args:
            module: the dropout module.
            own: its own forward method.
            hidden: its input, with B rows in the first dimension.
        """
        running, dropout = self._engine.running.forward, module()
        assert isinstance(dropout, _DROPOUTS)
        # An in-place dropout must change its input, and pieces that are put together are another tensor.
        if running is None or not dropout.training or dropout.inplace or not running.randomness.has_streams:
            return own(hidden)
        dropped: torch.Tensor = batched_call(("dropout", id(dropout)), hidden, partial(self._forward_all, own))
        return dropped

    def _forward_all(self, own_forward: _Forward, batches: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the outputs for all batches of the pass."""
        running = self._engine.forward
        if [len(each) for each in batches] != list(running.num_rows):  # a probe, or something else than hidden states
            return [own_forward(each) for each in batches]
        parts: list[list[torch.Tensor]] = [[] for _ in batches]
        for number, part in enumerate(running.micro_batches):
            # The stream of a micro-batch goes on from here into the blocks.
            with running.randomness.drawing(number):
                parts[part.batch].append(own_forward(batches[part.batch][part.start : part.stop]))
        return [each[0] if len(each) == 1 else torch.cat(each) for each in parts]
