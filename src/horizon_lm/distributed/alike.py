"""Start all ranks with the same weights, as DistributedDataParallel does: those of the first rank."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from horizon_lm.distributed.mesh import Mesh


def copy_from_first(mesh: Mesh, weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Overwrite the weights of all ranks with the values of the first rank. Return the names of the weights that were different.

    Without a common seed, each rank has drawn other values for new adapters, or for a model that was made in memory.

    Args:
        mesh: the ranks.
        weights: the weights in host memory, by name, on all ranks.

    Raises:
        DisagreementError: the ranks have other names.
    """
    if mesh.size == 1:
        return []
    names = hashlib.sha256("\n".join(weights).encode()).hexdigest()
    mesh.require_same("the start of a model", f"{len(weights)} weights, {names}")
    everyone = mesh.exchange(
        "the hashes of the weights", {name: hash_tensor(weight) for name, weight in weights.items()}
    )
    differing = [name for name in weights if len({hashes[name] for hashes in everyone}) > 1]
    for name in differing:
        values = weights[name].detach().contiguous()  # the weight's own memory, or a copy if it is not contiguous
        mesh.broadcast(values.view(-1).view(torch.uint8), 0)
        weights[name].data.copy_(values)
    return differing


def hash_tensor(weight: torch.Tensor) -> str:
    """Return the SHA-256 of the bytes of a tensor in host memory."""
    raw = weight.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().data).hexdigest() if raw.numel() else ""


@contextmanager
def drawing_alike(mesh: Mesh, device: torch.device) -> Iterator[None]:
    """Context manager: draw the same random numbers on all ranks, those of the first one. Afterwards, a rank whose state differed has its
    own state back, as it was before; the others go on after the numbers that were drawn.

    Args:
        mesh: the ranks.
        device: the device on which numbers are drawn.
    """
    states = mesh.exchange("the random state", _random_state(device))
    if states[mesh.rank] == states[0]:
        yield
        return
    _set_random_state(device, states[0])
    try:
        yield
    finally:
        _set_random_state(device, states[mesh.rank])


def _random_state(device: torch.device) -> list[str]:
    """Return the states of torch's generators on the host and on a GPU, as text, which ranks can exchange."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [state.numpy().tobytes().hex() for state in states]


def _set_random_state(device: torch.device, states: list[str]) -> None:
    """Set the generators to the states that `_random_state` has returned."""
    tensors = [torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8) for state in states]
    torch.set_rng_state(tensors[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensors[1], device)
