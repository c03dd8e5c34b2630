"""Distinguish the loss of another rank from other faults of a collective."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from horizon_lm.errors import HorizonError, RankLostError

# Parts of the messages of torch, gloo and NCCL by which such a failure is recognised.
_SIGNS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL")


@contextmanager
def noticing_lost_ranks() -> Iterator[None]:
    """Context manager: run collectives, and raise RankLostError in place of the error of one that fails because another rank is gone."""
    try:
        yield
    except HorizonError:
        raise
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS):
            raise RankLostError(
                "another rank has failed or ended its program, so this one cannot go on; its output says why. All ranks must make "
                "the same calls, until the last one"
            ) from error
        raise
