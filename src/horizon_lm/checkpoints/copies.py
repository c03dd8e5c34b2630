"""Verify a checkpoint for all ranks of a training, of which each machine may have a copy."""

import hashlib
from pathlib import Path

from horizon_lm.checkpoints.manifest import MANIFEST, Manifest, read_manifest, verify
from horizon_lm.distributed.mesh import Mesh, fail_together
from horizon_lm.distributed.same_files import SeenFiles
from horizon_lm.errors import ConfigError


def verify_copies(mesh: Mesh | None, folder: Path, is_verified: bool = False) -> Manifest:
    """Verify each copy of a checkpoint once, on the first rank that sees it. Return the manifest, which all copies share.

    Args:
        mesh: the ranks, all of which call this; None for one.
        folder: the folder of the checkpoint, by the same path on all ranks.
        is_verified: the first rank has verified its copy.

    Raises:
        ConfigError: a copy is damaged, or they are different checkpoints. It is raised on all ranks.
    """
    with fail_together(mesh, "the manifest of a checkpoint"):
        manifest = read_manifest(folder)
    if mesh is None:
        verify(folder, manifest)
        return manifest
    digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    hashes = mesh.exchange("the contents of a checkpoint", digest)
    if (rank := next((rank for rank, each in enumerate(hashes) if each != hashes[0]), None)) is not None:
        raise ConfigError(f"{folder}: rank {rank} has another checkpoint than rank 0; give all machines the same files")
    seen = SeenFiles(mesh, folder, [MANIFEST, *manifest.files])
    with fail_together(mesh, "the check of a checkpoint"):
        if seen.is_first_of_copy and not (is_verified and mesh.rank == 0):
            verify(folder, manifest)
    return manifest
