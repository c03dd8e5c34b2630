"""The frozen base of adapters in a checkpoint: its hashes instead of its weights, and the adapters' configs."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import xxhash

from horizon_lm.common.resources import usable_cores
from horizon_lm.common.units import Unit
from horizon_lm.distributed.mesh import Mesh
from horizon_lm.distributed.whole_units import borrowing, lend
from horizon_lm.errors import ConfigError
from horizon_lm.memory.arena import as_array
from horizon_lm.memory.store import Store
from horizon_lm.memory.unit_slabs import Slab
from horizon_lm.runs.checkpoints.finding import require_same_kind
from horizon_lm.runs.checkpoints.manifest import Manifest

# By store: the hashes of its base, and the version of its blocks at which they were taken. Only foreign code changes a base.
_known_hashes: "WeakKeyDictionary[Store, tuple[int, Mapping[str, str]]]" = WeakKeyDictionary()


def hash_base(store: Store, mesh: Mesh) -> Mapping[str, str]:
    """Return the xxh3-128 of the weights of each slab of frozen units; none if all units are saved.

    With several ranks, all of them call this, and the first one reads whole units, one at a time.
    """
    if store in _known_hashes:
        version, hashes = _known_hashes[store]
        if version == store.block_version:
            return hashes
    units = [unit for unit in store.units if unit in store.frozen]
    hashes = _hash_units(store, units) if mesh.size == 1 else _hash_shared_units(store, units, mesh)
    _known_hashes[store] = store.block_version, hashes
    return hashes


def _hash_units(store: Store, units: Sequence[Unit]) -> Mapping[str, str]:
    """Return the hashes of units, all of which are in this process."""
    slabs = _slabs_to_hash(store, units)
    with ThreadPoolExecutor(usable_cores()) as threads:
        return dict(zip((first.name for first, *_ in slabs), threads.map(_hash_slabs, slabs), strict=True))


def _hash_shared_units(store: Store, units: Sequence[Unit], mesh: Mesh) -> Mapping[str, str]:
    """Return the hashes of units, on all ranks: the first rank computes them, and the others lend it their parts."""
    own_hashes: dict[str, str] = {}  # none on a lender
    mesh.exchange("the hashing of a base", None)
    if mesh.rank > 0:
        lend(mesh, store)
    else:
        with borrowing(mesh, store):
            for unit in units:
                with store.whole(unit):
                    own_hashes |= {slabs[0].name: _hash_slabs(slabs) for slabs in _slabs_to_hash(store, [unit])}
    of_first: Mapping[str, str] = mesh.exchange("the hashes of the base", own_hashes)[0]
    return of_first


def _slabs_to_hash(store: Store, units: Iterable[Unit]) -> list[tuple[Slab, ...]]:
    """Return groups of slabs of some units, without empty ones. A group has one hash, under the name of its first slab."""
    groups = [slabs for unit in units for slabs in store.units[unit].hashed]
    return [slabs for slabs in groups if any(slab.layout.numel for slab in slabs)]


def _hash_slabs(slabs: Sequence[Slab]) -> str:
    """Return the hash of the values of slabs."""
    digest = xxhash.xxh3_128()
    for slab in slabs:
        for name in slab.layout:  # without the padding between tensors
            digest.update(as_array(slab.layout.view(slab.weights, name).reshape(-1)).data)
    return digest.hexdigest()


def require_base(folder: Path, manifest: Manifest, store: Store, mesh: Mesh) -> None:
    """Raise ConfigError if the adapters of a checkpoint were trained on another base than a store has."""
    if not manifest.base and not store.frozen:
        return
    require_same_kind(folder, bool(manifest.base), bool(store.frozen))
    for slab, own_hash in hash_base(store, mesh).items():
        if manifest.base.get(slab) != own_hash:
            raise ConfigError(
                f"{folder} has adapters of another base: the weights of {slab} differ from those that the adapters were trained "
                "on; load the same model"
            )


def write_adapter_configs(model: Any, folder: Path) -> None:
    """Write the config of each adapter, in folders as PEFT names them."""
    for name, config in getattr(model, "peft_config", {}).items():
        config.save_pretrained(folder if name == "default" else folder / name)
