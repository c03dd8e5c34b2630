"""Devices that die at a chosen operation and stay dead: from then on every call on them raises."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from horizon_lm.device.base import Device
from horizon_lm.device.cpu import CpuDevice
from horizon_lm.schedule.ops import Stream
from tests.support.threaded_device import ThreadedDevice


class Death:
    """The moment at which a device dies: at its n-th operation after `arm`.

    Attributes:
        count: operations since `arm`.
        killed_by: the operation at which the device died; empty while it lives.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at: int | None = None
        self.count, self.killed_by = 0, ""

    def arm(self, at: int) -> None:
        """Let the device die at this operation, counted from 0."""
        self._at, self.count = at, 0

    def pass_by(self, what: str) -> None:
        """Count an operation. Raise torch.AcceleratorError if the device dies at it, or is dead."""
        with self._lock:
            if not self.killed_by and self.count == self._at:
                self.killed_by = what
            self.count += 1
            if self.killed_by:
                raise torch.AcceleratorError(f"CUDA error: the device died ({self.killed_by}), and is asked for {what}")


_CALLS = (
    "allocate", "free", "poison", "trim", "spare_bytes", "host_buffer", "free_host", "register_host", "open_streams",
    "announce", "issue", "begin", "end", "wait", "synchronize", "cancel", "rng_state", "set_rng_state", "seeded_rng_state",
)  # fmt: skip
_TRANSFERS = ("copy", "gather", "land", "land_rows")


def _guarded(function: Callable[..., Any], name: str, death: Death) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        task = next((arg for arg in args if hasattr(arg, "op")), None)
        death.pass_by(name if task is None else f"{name} {task.op}")
        return function(*args, **kwargs)

    return call


def _guard(target: Any, names: tuple[str, ...], death: Death) -> Any:
    for name in names:
        setattr(target, name, _guarded(getattr(target, name), name, death))
    return target


def dying(make: Callable[..., CpuDevice], death: Death, **options: Any) -> Device:
    """Return an inline or simulated device on which every call and every transfer passes by ``death``."""
    device = make(**options)
    _guard(device.link, _TRANSFERS, death)
    return _guard(device, _CALLS, death)


class DyingThreaded(ThreadedDevice):
    """A device with streams in threads, on which everything that a real one asks of its driver passes by ``death``."""

    def __init__(self, death: Death, **options: Any) -> None:
        self._death = death
        super().__init__(**options)
        _guard(self, ("allocate", "begin", "end", "_use_stream"), death)

    def _open_stream(self, name: Stream) -> Any:
        stream, link = super()._open_stream(name)
        return stream, _guard(link, _TRANSFERS, self._death)

    def _record(self, stream: Any) -> Any:
        self._death.pass_by("record")
        return _GuardedEvent(super()._record(stream), self._death)

    def _wait_event(self, stream: Any, event: Any) -> None:
        self._death.pass_by("wait for an event")
        super()._wait_event(stream, event.event)

    def _synchronize_streams(self) -> None:
        self._death.pass_by("synchronize streams")
        super()._synchronize_streams()


class _GuardedEvent:
    """An event that the host cannot wait for once the device is dead. Streams wait for the event inside."""

    def __init__(self, event: Any, death: Death) -> None:
        self.event, self._death = event, death

    def query(self) -> bool:
        self._death.pass_by("query an event")
        return bool(self.event.query())

    def synchronize(self) -> None:
        self._death.pass_by("wait for an event")
        self.event.synchronize()
        self._death.pass_by("the end of a wait for an event")
