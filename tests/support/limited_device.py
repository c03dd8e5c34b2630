"""A device with little memory, of which the engine knows how much is left."""

from typing import Any

import horizon_lm
from horizon_lm.common.constants import DEVICE_MARGIN
from tests.support.threaded_device import ThreadedDevice


class LimitedDevice(ThreadedDevice):
    """A device of whose memory the engine's buffers are a part."""

    def __init__(self, limit: int) -> None:
        super().__init__(1, spare=0)
        self.limit = limit

    def spare_bytes(self) -> int | None:
        return self.limit - self.counters.allocated_total


def take_room(model: Any, device: LimitedDevice) -> None:
    """Limit a device to less than the last generation of a model with resident blocks has needed, by a part of a block."""
    (block,) = {n for kind, n in horizon_lm.stats(model)["device_bytes_by_kind"].items() if kind == "resident_weights"}
    device.limit = int((model._horizon.generation.peak - block // 4) / (1 - DEVICE_MARGIN))


def watch_resident_blocks(model: Any) -> list[int]:
    """Return a list to which each later forward pass of a model adds the number of its resident blocks."""
    engine, forward, seen = model._horizon.engine, model._horizon.forward, list[int]()

    def watched(*args: Any) -> Any:
        seen.append(engine.residency.weights)
        return forward(*args)

    model._horizon.forward = watched
    return seen
