"""A device with little memory, of which the engine knows how much is left."""

from tests.support.threaded_device import ThreadedDevice


class LimitedDevice(ThreadedDevice):
    """A device of whose memory the engine's buffers are a part."""

    def __init__(self, limit: int) -> None:
        super().__init__(1, spare=0)
        self.limit = limit

    def spare_bytes(self) -> int | None:
        return self.limit - self.counters.allocated_total
