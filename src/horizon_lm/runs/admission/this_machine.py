"""Describe the machine of a run: this machine in its current state, or another machine by its profile."""

import gc
import os
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horizon_lm.common.quantities import counted, format_bytes
from horizon_lm.errors import ConfigError
from horizon_lm.planning.arithmetic.catalog import Hardware, match_profile, own_profile_path, read_profile
from horizon_lm.planning.arithmetic.interconnect import connect
from horizon_lm.planning.arithmetic.request import Limit, Machine
from horizon_lm.runs.config import RunConfig

if TYPE_CHECKING:
    from horizon_lm.distributed.mesh import Mesh

LIBRARIES_BYTES = 2**30  # bytes of a process on another machine: interpreter, torch, transformers
FIRST_STEPS_BYTES = 112 * 2**20  # growth of the process in its first steps: compiled kernels, threads, library caches
CONTEXT_BYTES = 2**30  # bytes of a CUDA context on another machine
# In addition to an existing context: cuBLAS workspaces, 32 MiB on Hopper for each computing thread, and those of other
# libraries.
WORKSPACE_BYTES = 2**28
# Both links of a CUDA device, one for each direction. device/cuda_link.py allocates these sizes; they are repeated here
# because that module imports torch, which this one imports late. tests/numerics/test_cuda_memory.py compares them.
SCRATCH_BYTES = 2**27  # device memory in which copies change their dtype
STAGING_BYTES = 2**28  # page-locked host memory through which copies of memory that is not page-locked pass
_TRIAL_BYTES = 2**26  # more than RLIMIT_MEMLOCK usually allows
_ADDRESS_BYTES = 2**29  # address space that libraries and threads reserve and never touch


def this_machine(run: RunConfig, hardware: Hardware | None = None, num_processes: int | None = None) -> Machine:
    """Return the resources available to a run on this machine, or to one of the processes that share it.

    Args:
        run: settings of the run; ``device`` is not ``auto``.
        hardware: profile of this machine; None for the one that was measured, or a published one.
        num_processes: processes of this machine; None for those of torchrun.
    """
    import torch

    from horizon_lm.common.resources import file_size_limit, resident_bytes, usable_cores

    on_host = run.device == "cpu"
    # The device comes first: opening it creates a context, which adds to the process.
    gpu, device_limits, lock_error = ("", [], "") if on_host else _probe_device(run.device)
    gc.collect()  # do not count a previous model as part of the process
    limits, notes = _host_limits(run.host_memory)
    if not on_host and run.device_memory is not None:  # of what torch allocates
        device_limits = [*device_limits, Limit("device_memory", run.device_memory)]
    is_connected = num_processes is None
    num_processes = num_processes or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    disk, download = _disk_limits(Path(run.output_dir).expanduser())
    return Machine(
        name=f"this machine, {gpu}" if gpu else "this machine",
        on_host=on_host,
        hardware=hardware or own_profile("cpu" if on_host else "cuda", gpu) or match_profile(gpu),
        host_limits=_limits_of_process(limits, num_processes),
        device_limits=device_limits,
        disk_limits=disk,
        file_limit=file_size_limit(),
        download_limits=download,
        process_bytes=resident_bytes() + FIRST_STEPS_BYTES,
        device_context_bytes=0 if on_host else WORKSPACE_BYTES,
        scratch_bytes=0 if on_host else SCRATCH_BYTES,
        staging_bytes=0 if on_host else STAGING_BYTES,
        page_lock_error=lock_error,
        notes=notes,
        compile_workers=min(32, usable_cores()),
        computing_threads=torch.get_num_threads() if on_host else None,
        num_processes=num_processes,
        is_connected=is_connected,
    )


def agree_on_machine(mesh: "Mesh", own: Machine) -> Machine:
    """Return a machine that is the same on all ranks, so that all ranks make the same plan.

    Of each kind of memory it has as little as the rank with the least. Its disk is the first rank's, which writes the run's folder.

    Args:
        mesh: the ranks.
        own: the resources of this rank.
    """
    if mesh.size == 1:
        return own
    own_resources: dict[str, Any] = {name: [astuple(limit) for limit in getattr(own, name)] for name in _LIMITS}
    own_resources |= {name: getattr(own, name) for name in ("file_limit", "process_bytes", "page_lock_error")}
    everyone = mesh.exchange("the memory of a machine", own_resources)

    def limits(name: str, ranks: Sequence[Any]) -> list[Limit]:
        """Return the limits of a kind on these ranks."""
        return [Limit(*limit) for each in ranks for limit in each[name]]

    def least(name: str) -> list[Limit]:
        """Return the smallest limit of a kind on all ranks; none if no rank has one."""
        return sorted(limits(name, everyone), key=lambda limit: limit.bytes)[:1]

    return replace(
        own,
        host_limits=least("host_limits"),
        device_limits=least("device_limits"),
        disk_limits=limits("disk_limits", everyone[:1]),
        download_limits=limits("download_limits", everyone[:1]),
        file_limit=min((each["file_limit"] for each in everyone if each["file_limit"] is not None), default=None),
        process_bytes=max(each["process_bytes"] for each in everyone),
        page_lock_error=next((each["page_lock_error"] for each in everyone if each["page_lock_error"]), ""),
    )


_LIMITS = ("host_limits", "device_limits", "disk_limits", "download_limits")


def _limits_of_process(limits: Sequence[Limit], num_processes: int) -> list[Limit]:
    """Return the limits of one of several processes that share a machine equally, with names that say so."""
    if num_processes == 1:
        return list(limits)
    return [Limit(f"{each.name} / {num_processes}", each.bytes // num_processes) for each in limits]


def _host_limits(host_memory: int | None) -> tuple[list[Limit], list[str]]:
    """Return the limits on the run's host memory, smallest first, and notes about them.

    ``host_memory`` overrides estimates of free memory, which are not enforced: memory may be added on demand, or other
    processes may release memory. Limits of control groups and of the process are enforced, so ``host_memory`` does not
    override them.
    """
    from horizon_lm.common.resources import memory_limits

    limits, notes = [], []
    for found in memory_limits():
        if found.is_estimate and host_memory is not None and found.room < host_memory:
            notes.append(
                f"host_memory: {format_bytes(host_memory)} exceeds the {format_bytes(found.room)} available now "
                f"({found.name}); if the machine cannot provide it, it will swap or kill the run without a message"
            )
            continue
        reserved = _ADDRESS_BYTES if found.name.startswith("RLIMIT") else 0
        limits.append(Limit(found.name, found.room - reserved))
    if host_memory is not None:
        limits.append(Limit("host_memory", host_memory))
    return sorted(limits, key=lambda limit: limit.bytes), notes


def _probe_device(device: str) -> tuple[str, list[Limit], str]:
    """Return a GPU's name, the bytes torch can allocate on it, and why host memory cannot be page-locked (or an empty
    text).

    Page-locking is tried, because some drivers ignore RLIMIT_MEMLOCK.
    """
    import torch

    from horizon_lm.common.resources import memlock_limit
    from horizon_lm.device.cuda import CudaDevice, allocatable_bytes

    lock_error = ""
    opened = CudaDevice(device)
    where = opened.torch_device
    if error := opened.try_registering(_TRIAL_BYTES):
        limit = memlock_limit()
        allowed = "unlimited" if limit is None else format_bytes(limit)
        lock_error = f"{error}; RLIMIT_MEMLOCK is {allowed}"
    gpu, (_, total) = torch.cuda.get_device_properties(where).name, torch.cuda.mem_get_info(where)
    return gpu, [Limit(f"free of {total:,} bytes on {gpu}", allocatable_bytes(where))], lock_error


def _disk_limits(output_dir: Path) -> tuple[list[Limit], list[Limit]]:
    """Return the free space for the run's folder, and the free space for downloads if they go to another disk.

    Raises:
        ConfigError: the folder can never be written to, as in /proc.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    from horizon_lm.common.resources import disk_free, file_system, takes_files

    try:
        if not takes_files(output_dir):
            raise ConfigError(f"output_dir: {output_dir} cannot be written to; choose another folder")
        disk = [Limit(f"free in {output_dir}", disk_free(output_dir))]
        cache = Path(HF_HUB_CACHE)
        is_same_disk = file_system(cache) == file_system(output_dir)
        return disk, [] if is_same_disk else [Limit(f"free in {cache}", disk_free(cache))]
    except OSError:  # not accessible: the error is raised when something is written there
        return [], []


def other_machine(hardware: Hardware, host_memory: int | None, gpus: int = 1, machines: int = 1) -> Machine:
    """Return another machine, described by its profile; with several GPUs, the share of one process of it.

    Args:
        hardware: profile of the machine.
        host_memory: bytes of host memory of the machine; None for the profile's.
        gpus: GPUs of each machine.
        machines: number of machines.

    Raises:
        ConfigError: the profile does not describe several GPUs or a network.
    """
    name, interconnect = hardware.name, None
    num_bytes = host_memory or hardware.host_memory
    notes, remarks = _notes_on_modules(hardware, num_bytes)
    hardware = hardware.with_host_memory(num_bytes)
    if gpus * machines > 1:
        hardware, interconnect = connect(hardware, gpus, machines)
        name = f"{counted(machines, 'machine')} with {counted(gpus, 'GPU')}{' each' if machines > 1 else ''}: {name}"
        if gpus > 1:
            rate = hardware.host_rate * gpus / 1e9
            name = f"{name}; the host of all: {hardware.cores * gpus} cores, {rate:,.0f} GB/s of host memory"
    # A server with several GPUs has more memory than the profile's machine with one.
    host = Limit("host_memory" if host_memory else "host memory of this profile", host_memory or hardware.host_memory)
    on_host = hardware.on_host
    return Machine(
        name,
        on_host,
        hardware,
        _limits_of_process([host], gpus),
        [] if on_host else [Limit(f"memory of {hardware.name}", hardware.device_memory)],
        process_bytes=LIBRARIES_BYTES + FIRST_STEPS_BYTES,
        device_context_bytes=0 if on_host else CONTEXT_BYTES,
        scratch_bytes=0 if on_host else SCRATCH_BYTES,
        staging_bytes=0 if on_host else STAGING_BYTES,
        display_bytes=int(hardware.desktop.get("display_memory", 0)),
        notes=notes,
        remarks=remarks,
        num_processes=gpus,
        interconnect=interconnect,
    )


def _notes_on_modules(hardware: Hardware, host_memory: int) -> tuple[list[str], list[str]]:
    """Return notes and remarks about the memory modules of a desktop, of which two are faster than four.

    There is a note if the host memory takes more than two modules: the plan has the rates of four. There is a remark if it is larger
    than the profile's, but two modules suffice: with four it would be slower.

    Args:
        hardware: the profile as it is published, with the rates of two modules.
        host_memory: the bytes that were asked for.
    """
    desktop = hardware.desktop
    if "two_modules" not in desktop or host_memory <= hardware.host_memory:
        return [], []
    fast, slow = hardware.host_rate / 1e9, desktop["four_modules_bandwidth"] / 1e9
    if host_memory > desktop["two_modules"]:
        note = f"host memory: so much takes four modules, which run slower than two: {slow:,.0f} GB/s instead of {fast:,.0f} are planned"
        return [note], []
    return [], [
        f"host memory: {fast:,.0f} GB/s are those of two modules; with four, which run slower, it would be about {slow:,.0f}"
    ]


def own_profile(device: str, gpu: str = "") -> Hardware | None:
    """Return the profile that ``horizon-lm doctor`` measured on this machine, or None without a profile for this device."""
    try:
        profile = read_profile(own_profile_path())
    except ConfigError:  # no profile, or one of another version: the plan has no times
        return None
    return profile if profile.device == device and profile.gpu == gpu else None
