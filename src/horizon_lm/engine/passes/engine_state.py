"""The parts of the engine that all its passes use: host memory, device buffers, cursor, gradients, updates and saves."""

from collections import Counter

import torch
from torch import nn

from horizon_lm.common.units import EMBED, HEAD, Unit
from horizon_lm.device.base import Device
from horizon_lm.distributed.mesh import Mesh
from horizon_lm.engine.host.foreign_writes import ForeignWrites
from horizon_lm.engine.host.host_grads import HostGrads
from horizon_lm.engine.host.slab_parts import SlabPart
from horizon_lm.engine.host.updates import PendingUpdates
from horizon_lm.engine.passes.cursor import Cursor
from horizon_lm.engine.passes.device_buffers import DeviceBuffers, EngineOptions
from horizon_lm.engine.passes.expert_tiles import ExpertTiles
from horizon_lm.engine.passes.forward_state import BetweenPasses, BoundaryPool
from horizon_lm.engine.passes.saves import Saves
from horizon_lm.errors import StreamingError
from horizon_lm.memory.store import Store
from horizon_lm.memory.unit_slabs import UnitSlabs
from horizon_lm.model.parts import ModelParts, ParamRef
from horizon_lm.planning.arithmetic.residency import ExpectedBatch, Residency
from horizon_lm.schedule import build


class EngineState:
    """The parts of the engine, and the properties of the model that determine its schedules.

    Attributes:
        refs: the model's parameters by full name.
        counts: rows computed by blocks, by kind of computation.
        expected: the largest batch for which buffers are made.
        between: the state that a pass leaves for those that follow.
        residency: what stays on the device between passes.
        tiles: the tiles in which the experts of blocks are streamed.
        device_lost: the device has failed, and host memory was settled without it.
        retired: the model was attached again, with other adapters.
    """

    def __init__(self, parts: ModelParts, store: Store, device: Device, options: EngineOptions, mesh: Mesh) -> None:
        self.parts, self.store, self.device, self.options, self.mesh = parts, store, device, options, mesh
        self.refs: dict[str, ParamRef] = {ref.name: ref for ref in parts.refs()}
        # Identities stay unique because `refs` holds the parameters.
        self._name_of = {id(ref.param): name for name, ref in self.refs.items()}
        self.cursor = Cursor(device)
        self.tiles = ExpertTiles(parts, store, options.expert_tile)
        self.memory = DeviceBuffers(store, device, options, self.tiles)
        self.boundaries, self.between = BoundaryPool(device, [*parts.towers, parts.decoder_blocks]), BetweenPasses()
        self.grads = HostGrads(self.refs, store, device)
        self.updates = PendingUpdates(device)
        self.saves = Saves(self.cursor, self.updates, device)
        self.foreign_writes = ForeignWrites(self.refs, store)
        self.counts: Counter[str] = Counter()
        self.expected = ExpectedBatch()
        self.residency = Residency(0)
        self.device_lost = self.retired = False

    def slab_unit(self, unit: Unit) -> Unit:
        """Return the unit whose slabs hold this unit: the embedding for a tied head."""
        return EMBED if unit == HEAD and self.parts.tied else unit

    def slabs(self, unit: Unit) -> UnitSlabs:
        """Return the host slabs that hold a unit."""
        return self.store.units[self.slab_unit(unit)]

    def part_of(self, unit: Unit) -> SlabPart:
        """Return the slabs that hold a unit, or the part of them that belongs to a tile, or to a block without its tiles."""
        return self.tiles.part(unit)

    def weights_on_device(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Return views of a unit's weights in the buffers that they are streamed into, by full name."""
        part, slot = self.part_of(unit), self.memory.weights_of(unit)
        return {name: part.layout.view(slot, name) for name in part.layout if part.has(name)}

    def poison_weights(self, unit: Unit) -> None:
        """Let a late read of a unit's weights yield NaN on a simulated device."""
        for buffer in self.memory.weights_of(unit):
            self.device.poison(buffer)

    def name_of(self, param: nn.Parameter) -> str | None:
        """Return the full name of a parameter; None for one that is not the model's."""
        return self._name_of.get(id(param))

    def trainable(self) -> dict[Unit, list[str]]:
        """Return the full names of the parameters that currently require a gradient, by the unit that owns their slabs."""
        # Asked in every pass for every parameter: through the class, each would be a call in Python.
        with torch._C.DisableTorchFunctionSubclass():
            return {
                unit: [name for name in slabs.layout if self.refs[name].param.requires_grad]
                for unit, slabs in self.store.units.items()
            }

    @property
    def layout(self) -> build.Layout:
        """The properties of the model and its settings that determine its schedules."""
        return build.Layout(
            num_blocks=self.parts.num_blocks,
            tied=self.parts.tied,
            offloaded=self.parts.num_blocks - self.residency.boundaries,
            resident=self.residency.weights,
            accumulates=self.memory.accumulates,
            update_in_backward=self.updates.optimizer_in_backward is not None,
            adapters=bool(self.parts.adapters),
            sharded=self.mesh.size > 1,
            packed=self.memory.gathers_packed,
            tiles=self.tiles.counts,
        )

    def drain(self) -> None:
        """Block until no copy, no update and no save is running."""
        if not self.device_lost:
            # The embedding's part of a checkpoint waits for its update, and may not be issued yet.
            self.saves.finish_issuing()
            self.device.synchronize()
        self.updates.finish()
        # The tasks of a running pass are in the same table, and the next pass has to wait for them.
        if not self.cursor.active:
            self.cursor.forget()

    def resume_interrupted(self) -> None:
        """Issue the rest of an update or save that was interrupted; raise PartialUpdateError if an update was cut off."""
        self.require_attached()
        self.updates.partial_update.require_complete()
        # What an interrupt has left over has no computation to wait for: `Engine.issue_update` abandons an update that has one.
        if self.cursor.schedule is not None and self.cursor.schedule.name in ("update", "save"):
            self.cursor.finish()

    def require_attached(self) -> None:
        """Raise StreamingError if the model was attached again, with other adapters."""
        if self.retired:
            raise StreamingError(
                "the model has other adapters, or trains another one, since this optimizer was created or this loss computed; "
                "create the optimizer after the adapters"
            )

    def require_device(self) -> None:
        """Raise StreamingError if the device has failed."""
        if self.device_lost:
            raise StreamingError(
                "the device has failed, so this model cannot compute any more; its weights can be read and saved. Load it "
                "in a new process."
            )
