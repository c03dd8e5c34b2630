"""The forward computation of a block as an operation of the schedule, or as two, between which its experts are streamed in.

Shapes: N tokens, K experts of a token.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from horizon_lm.engine.passes.executor import Engine
from horizon_lm.schedule.ops import Kind
from horizon_lm.units import block


def computing(engine: Engine, index: int) -> AbstractContextManager[None]:
    """Context manager: compute a block in the running forward pass."""
    if index in engine.forward.routed:
        return _in_two_parts(engine, index)
    return engine.cursor.compute(Kind.FORWARD, block(index))


@contextmanager
def _in_two_parts(engine: Engine, index: int) -> Iterator[None]:
    """Context manager: compute a block up to its experts, stream those that its tokens are routed to, and compute the rest."""
    experts, cursor, unit = engine.routed.experts[index], engine.cursor, block(index)
    with ExitStack() as part:
        part.enter_context(cursor.compute(Kind.ROUTE, unit))
        is_routed = False

        def stream(chosen: list[int]) -> None:
            nonlocal is_routed
            is_routed = True
            cursor.bind(Kind.STREAM_EXPERTS, unit, engine.routed.expert_moves(unit, engine.memory, chosen))
            part.pop_all().close()
            part.enter_context(cursor.compute(Kind.FORWARD, unit))

        def before_experts(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stream(_chosen(args, kwargs, experts.count))

        with experts.module.register_forward_pre_hook(before_experts, with_kwargs=True):
            yield
        if not is_routed:  # the block has left out its experts
            stream([])


def _chosen(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> list[int]:
    """Return the experts of all tokens, sorted, from the arguments of the module that computes them.

    This waits for the computation on the device, but not for its copies.
    """
    ids: torch.Tensor = args[1] if len(args) > 1 else next(kwargs[name] for name in _IDS if name in kwargs)  # (N, K)
    # Some models mark what has no expert by the number after the last.
    return [each for each in sorted(set(ids.flatten().tolist())) if each < count]


_IDS = ("top_k_index", "router_indices")
