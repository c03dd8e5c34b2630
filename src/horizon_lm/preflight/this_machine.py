"""The machine of a run: this one, as it is now, or another by its profile."""

import gc
from pathlib import Path

from horizon_lm.config import RunConfig
from horizon_lm.errors import ConfigError
from horizon_lm.plan.catalog import Hardware, match_profile, own_profile_path, read_profile
from horizon_lm.plan.request import Limit, Machine
from horizon_lm.quantities import format_bytes

LIBRARIES_BYTES = 2**30  # of a process on a machine that is not this one: interpreter, torch, transformers
FIRST_STEPS_BYTES = 160 * 2**20  # what compiled kernels, threads and library caches add once training begins
CONTEXT_BYTES = 2**30  # on a device that is not here; with a context of this process, only its libraries' workspaces:
# two of cuBLAS, 32 MiB each on Hopper, one for each thread that computes, and what other libraries keep
WORKSPACE_BYTES = 2**28
SCRATCH_BYTES = 2**27  # as device.cuda has it for two links
STAGING_BYTES = 2**28
_TRIAL_BYTES = 2**26  # more than RLIMIT_MEMLOCK usually allows
_ADDRESS_BYTES = 2**29  # libraries and threads reserve addresses that they never touch


def this_machine(run: RunConfig, hardware: Hardware | None = None) -> Machine:
    """What a run may take here. ``run.device`` is one that exists, not ``auto``."""
    import torch

    from horizon_lm.resources import resident_bytes, usable_cores

    on_host = run.device == "cpu"
    # First: it makes the device's context.
    gpu, device_limits, refusal = ("", [], "") if on_host else _look_at_device(run.device)
    gc.collect()  # a model of before is no part of the process
    limits, notes = _host_limits(run.host_memory)
    disk, download = _disk_limits(Path(run.output_dir).expanduser())
    return Machine(
        name=f"this machine, {gpu}" if gpu else "this machine",
        on_host=on_host,
        hardware=hardware or own_profile("cpu" if on_host else "cuda", gpu) or match_profile(gpu),
        host_limits=limits,
        device_limits=device_limits,
        disk_limits=disk,
        download_limits=download,
        process_bytes=resident_bytes() + FIRST_STEPS_BYTES,
        device_context_bytes=0 if on_host else WORKSPACE_BYTES,
        scratch_bytes=0 if on_host else SCRATCH_BYTES,
        staging_bytes=0 if on_host else STAGING_BYTES,
        lock_refusal=refusal,
        notes=notes,
        compile_workers=min(32, usable_cores()),
        computing_threads=torch.get_num_threads() if on_host else None,
    )


def _host_limits(host_memory: int | None) -> tuple[list[Limit], list[str]]:
    """What bounds the run's host memory, the smallest first, and what to say of it.

    ``host_memory`` counts more than what the system says is free, for that is no limit: memory may be added on demand, or
    others may give theirs back. What a control group or the process's own limits say is enforced.
    """
    from horizon_lm.resources import memory_limits

    limits, notes = [], []
    for found in memory_limits():
        if found.is_estimate and host_memory is not None and found.room < host_memory:
            notes.append(
                f"host_memory: {format_bytes(host_memory)} are more than the {format_bytes(found.room)} that are there now "
                f"({found.name}); if the machine cannot give as much, it swaps, or ends the run without a word"
            )
            continue
        reserved = _ADDRESS_BYTES if found.name.startswith("RLIMIT") else 0
        limits.append(Limit(found.name, found.room - reserved))
    if host_memory is not None:
        limits.append(Limit("host_memory", host_memory))
    return sorted(limits, key=lambda limit: limit.num_bytes), notes


def _look_at_device(device: str) -> tuple[str, list[Limit], str]:
    """A GPU's name, what torch's allocator could give out, and why host memory cannot be page-locked; empty if it can.

    RLIMIT_MEMLOCK does not bind every driver, so a trial decides.
    """
    import torch

    from horizon_lm.device.cuda import CudaDevice, allocatable_bytes
    from horizon_lm.resources import memlock_limit

    refusal = ""
    opened = CudaDevice(device)
    where = opened.torch_device
    if error := opened.try_registering(_TRIAL_BYTES):
        limit = memlock_limit()
        allowed = "unlimited" if limit is None else format_bytes(limit)
        refusal = f"{error}; RLIMIT_MEMLOCK is {allowed}"
    gpu, (_, total) = torch.cuda.get_device_properties(where).name, torch.cuda.mem_get_info(where)
    return gpu, [Limit(f"free of {total:,} bytes on {gpu}", allocatable_bytes(where))], refusal


def _disk_limits(output_dir: Path) -> tuple[list[Limit], list[Limit]]:
    """What is free for the run's folder, and for downloads where these go to another disk."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from horizon_lm.resources import disk_free, file_system

    try:
        disk = [Limit(f"free in {output_dir}", disk_free(output_dir))]
        cache = Path(HF_HUB_CACHE)
        same = file_system(cache) == file_system(output_dir)
        return disk, [] if same else [Limit(f"free in {cache}", disk_free(cache))]
    except OSError:  # not to be looked at; whoever writes there will say so
        return [], []


def other_machine(hardware: Hardware, host_memory: int | None) -> Machine:
    """A machine that is not here, by its profile; with another amount of host memory, if that is given."""
    host = host_memory or hardware.host_memory
    on_host = hardware.on_host
    return Machine(
        hardware.name,
        on_host,
        hardware,
        [Limit("host_memory" if host_memory else "host memory of this profile", host)],
        [] if on_host else [Limit(f"memory of {hardware.name}", hardware.device_memory)],
        process_bytes=LIBRARIES_BYTES + FIRST_STEPS_BYTES,
        device_context_bytes=0 if on_host else CONTEXT_BYTES,
        scratch_bytes=0 if on_host else SCRATCH_BYTES,
        staging_bytes=0 if on_host else STAGING_BYTES,
    )


def own_profile(device: str, gpu: str = "") -> Hardware | None:
    """What ``horizon-lm doctor`` measured here, if it did for this device."""
    try:
        profile = read_profile(own_profile_path())
    except ConfigError:  # there is none, or not one of this version: a plan goes without seconds
        return None
    return profile if profile.device == device and profile.gpu == gpu else None
