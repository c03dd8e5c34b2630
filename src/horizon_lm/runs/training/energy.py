"""Measure the energy of the processors and of a GPU, with the counters of RAPL and NVML.

RAPL's counters are files below ``/sys/class/powercap``, on AMD's processors, too. Since Linux 5.10 only root may read them, unless
somebody has changed that. NVML has a counter of a whole GPU since Volta, for every user, but none of a MIG instance; it needs
``nvidia-ml-py``. What no counter covers is missing: fans, disks, power supplies, and memory on many desktops.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")
# No processor takes more. So in less time than its range lasts at this power, a counter begins anew at most once.
_MOST_WATTS = 1000


@dataclass(frozen=True, slots=True)
class Energy:
    """Energy in joules; None without a counter.

    Attributes:
        host: energy of the processors, and of the memory if it has a counter.
        device: energy of the GPU, with its memory.
    """

    host: float | None = None
    device: float | None = None

    def __add__(self, other: "Energy") -> "Energy":
        return Energy(_sum(self.host, other.host), _sum(self.device, other.device))

    @property
    def total(self) -> float | None:
        """The sum of the known amounts; None if both are unknown."""
        known = [each for each in (self.host, self.device) if each is not None]
        return sum(known) if known else None


UNKNOWN = Energy()


def _sum(a: float | None, b: float | None) -> float | None:
    """Return the sum of two amounts; None if one is unknown."""
    return None if a is None or b is None else a + b


class EnergyMeter:
    """Measures the energy between two readings.

    Args:
        gpu: the GPU's UUID as torch prints it, without "GPU-"; None for no GPU.
        with_host: also read the counters of the processors; False if another process of the machine reads them, and this one counts 0.
        powercap: folder of RAPL's zones.
        clock: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        gpu: str | None,
        with_host: bool = True,
        powercap: Path = _POWERCAP,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._zones = _readable_zones(powercap) if with_host else []
        self._with_host = with_host
        self._gpu = None if gpu is None else _gpu_counter(gpu)
        self._clock, self._read_at = clock, clock()

    def read(self) -> Energy:
        """Return the energy since the last reading or the construction.

        The host's is unknown if a counter may have begun anew more than once since then.
        """
        now = self._clock()
        seconds, self._read_at = now - self._read_at, now
        of_zones = [zone.read(seconds) for zone in self._zones]
        known = [each for each in of_zones if each is not None]
        # Without zones, the host counts 0 if another process reads them, and is unknown otherwise.
        host = sum(known) if len(known) == len(of_zones) and (of_zones or not self._with_host) else None
        return Energy(host, None if self._gpu is None else self._gpu())


class _Zone:
    """A zone of RAPL. Its counter of microjoules begins anew at zero after its range, within minutes on a busy server."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._last = int(self._file.read_text())

    def read(self, seconds: float) -> float | None:
        """Return the joules since the last reading, this many seconds ago; None if it cannot be read, or may have begun anew twice."""
        try:
            before, self._last = self._last, int(self._file.read_text())
        except OSError:
            return None
        if seconds * _MOST_WATTS * 1e6 >= self._range:
            return None
        return (self._last - before) % self._range / 1e6


def _readable_zones(powercap: Path) -> list[_Zone]:
    """Return the zones of processors and of memory; others are parts of these, or contain them."""
    zones = []
    for folder in sorted(powercap.glob("intel-rapl:*")):
        try:
            if (folder / "name").read_text().startswith(("package", "dram")):
                zones.append(_Zone(folder))
        except (OSError, ValueError):
            return []  # the sum of the other zones would be taken for the sum of all
    return zones


def _gpu_counter(uuid: str) -> Callable[[], float | None] | None:
    """Return a function that returns the joules of a GPU since its last call; None if there is no such counter."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        last = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # millijoules since the driver was loaded
    except pynvml.NVMLError:
        return None

    def read() -> float | None:
        """Return the joules since the last call; None if the counter cannot be read."""
        nonlocal last
        try:
            before, last = last, pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except pynvml.NVMLError:
            return None
        return float(last - before) / 1e3

    return read
