"""The forward computation of a block as an operation of the schedule, or as two, between which its experts are streamed in.

Shapes: N tokens, K experts of a token.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.units.expert_call import ExpertCall
from horizon_lm.engine.units.tiled_computation import TiledExperts
from horizon_lm.model.routed_experts import expert_arguments
from horizon_lm.schedule.ops import Kind
from horizon_lm.units import block


def computing(engine: Engine, index: int, calls: list[ExpertCall]) -> AbstractContextManager[None]:
    """Context manager: compute a block in the running forward pass.

    Args:
        engine: the model's engine.
        index: the block's index.
        calls: receives the calls of its experts, if they are cut into tiles.
    """
    if index in engine.tiles.experts:
        return TiledExperts(engine, index).forward(calls)
    if index in engine.forward.routed:
        return _in_two_parts(engine, index)
    return engine.cursor.compute(Kind.FORWARD, block(index))


@contextmanager
def _in_two_parts(engine: Engine, index: int) -> Iterator[None]:
    """Context manager: compute a block up to its experts, stream those that its tokens are routed to, and compute the rest."""
    experts, cursor, unit = engine.routed.experts[index], engine.cursor, block(index)
    with ExitStack() as current:
        current.enter_context(cursor.compute(Kind.ROUTE, unit))
        is_routed = False

        def stream(chosen: list[int]) -> None:
            nonlocal is_routed
            is_routed = True
            cursor.bind(Kind.STREAM_EXPERTS, unit, engine.routed.expert_moves(unit, engine.memory, chosen))
            current.pop_all().close()  # ends ROUTE; the rest of the block is FORWARD
            current.enter_context(cursor.compute(Kind.FORWARD, unit))

        def before_experts(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            _, ids, _ = expert_arguments(args, kwargs)
            stream(_chosen(ids, experts.count))

        with experts.module.register_forward_pre_hook(before_experts, with_kwargs=True):
            yield
        if not is_routed:  # the block has left out its experts
            stream([])


def _chosen(ids: torch.Tensor, count: int) -> list[int]:
    """Return the experts of all tokens, sorted, from those of each token (N, K).

    This waits for the computation on the device, but not for its copies.
    """
    # Some models give a token without an expert the number after that of the last expert.
    return [each for each in sorted(set(ids.flatten().tolist())) if each < count]
