"""Divide the cores of a machine between its ranks, and keep each rank near its device.

Memory is taken from the socket of the thread that writes it first, so a rank near its device has its weights there, too
(docs/decisions/020-memory-of-two-sockets.md).
"""

import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from horizon_lm.common.resources import limit_cores, usable_cores

_PCI = Path("/sys/bus/pci/devices")


def divide_cores(rank: int, exchange: Callable[[str, Any], list[Any]], device: torch.device) -> None:
    """Pin this process to the cores near its device, and limit it to its share of them. All ranks must call it.

    Cores that a launcher has given to this process alone are all its own. Ranks that may use the same cores share them equally.

    Args:
        rank: the number of this rank.
        exchange: function of a description and a value that returns the values of all ranks.
        device: the device of this rank.
    """
    limit_cores(None)  # `usable_cores` below returns what the system allows
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    here = socket.gethostname()
    everyone = exchange("the cores of a rank", [here, sorted(allowed), sorted(cores_near(device))])
    # The allowed and the near cores of each rank of this machine.
    of_machine = {other: cores for other, (host, *cores) in enumerate(everyone) if host == here}
    cores_of_ranks = keep_near(
        [set(allowed_there) for allowed_there, _ in of_machine.values()], [set(near) for _, near in of_machine.values()]
    )
    own = cores_of_ranks[list(of_machine).index(rank)]
    if own != allowed:
        _move_threads(own)
    quota = usable_cores()  # fewer than the cores if a control group limits their time, for all ranks together
    limit_cores(share_of(own, cores_of_ranks, quota if quota < len(own) else None))


def keep_near(allowed: Sequence[set[int]], near: Sequence[set[int]]) -> list[set[int]]:
    """Return the cores of each rank of a machine: the allowed ones near its device or, if that left a rank or a core unused, all allowed.

    Args:
        allowed: the cores that each rank may use.
        near: the cores near the device of each rank; empty if unknown.
    """
    allowed_and_near = [own & close for own, close in zip(allowed, near, strict=True)]
    is_all_used = set().union(*allowed_and_near) == set().union(*allowed)
    return allowed_and_near if all(allowed_and_near) and is_all_used else list(allowed)


def share_of(own: set[int], cores_of_ranks: Sequence[set[int]], quota: int | None) -> int:
    """Return the number of cores that a rank may use, at least one.

    Args:
        own: its cores.
        cores_of_ranks: the cores of each rank of the machine, this one included.
        quota: cores whose time all ranks of the machine share; None for no limit.
    """
    num_users = Counter(core for cores in cores_of_ranks for core in cores)
    share = sum(1 / num_users[core] for core in own)
    if quota is not None:
        share = min(share, quota / len(cores_of_ranks))
    return max(1, math.floor(share + 1e-6))  # three thirds may add up to slightly less than 1


def cores_near(device: torch.device, devices: Path = _PCI) -> set[int]:
    """Return the cores on the side of the machine to which a device is attached; none if that is unknown.

    Args:
        device: the device.
        devices: the folder of PCI devices in sysfs.
    """
    if device.type != "cuda":
        return set()
    found: Any = torch.cuda.get_device_properties(device)  # torch's type annotations lack the address
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    try:
        text = (devices / address / "local_cpulist").read_text()
    except OSError:  # another system, or not visible in a container
        return set()
    bounds = [part.split("-") for part in text.strip().split(",") if part]  # such as 0-15,32-47 or 0,2
    return {core for first, *last in bounds for core in range(int(first), int(last[0] if last else first) + 1)}


def _move_threads(cores: set[int]) -> None:
    """Keep all threads of this process to these cores; threads that they start inherit it."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)
