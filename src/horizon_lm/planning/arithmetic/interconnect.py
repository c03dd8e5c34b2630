"""The links between the devices of several ranks, and the rates of their collectives."""

from dataclasses import dataclass, replace

from horizon_lm.errors import ConfigError
from horizon_lm.planning.arithmetic.catalog import Hardware


@dataclass(frozen=True, slots=True)
class Interconnect:
    """The links between the devices of equal machines, with one rank for each device.

    Ranks of a machine are neighbours, so a copy of the model lies within a machine if its ranks fit there.

    Attributes:
        gpus: devices of each machine.
        machines: number of machines.
        peer: bytes per second that a device receives from the others of its machine while it sends as many; 0 if they cannot reach
            each other, so that these bytes cross the links to the host and host memory.
        network: bytes per second that a machine receives from the others while it sends as many; 0 for a single machine.
    """

    gpus: int
    machines: int = 1
    peer: float = 0.0
    network: float = 0.0

    @property
    def through_host(self) -> bool:
        """True if collectives within a machine cross the links to the host."""
        return self.gpus > 1 and not self.peer

    def gather_rate(self, ranks: int) -> float:
        """Return the bytes per second that a rank receives when the ranges of ``ranks`` ranks are gathered; infinite if they cross
        neither links between devices nor a network.

        Data travel in a ring: each link between neighbours carries all bytes that its receiver lacks, also a link into another machine.
        """
        received = (ranks - 1) / ranks
        return self._rate(
            received,
            within=received if self.gpus > 1 else 0.0,
            into_machine=received if ranks > self.gpus else 0.0,
        )

    def reduce_rate(self, ranks: int, copies: int, itemsize: int = 4) -> float:
        """Return the bytes per second of a sum of gradients, counted as if a rank received its range from each other rank.

        If a copy of the model spans machines with several devices, the sums go along a chain of these machines instead, and a machine in
        the middle receives the most.

        Args:
            ranks: ranks that share a copy of the model.
            copies: number of copies.
            itemsize: bytes of an element of the gradients.
        """
        # The figures below are shares of the bytes of all ranks. The ranks that have the same range of different copies sum it in a ring.
        over_copies = 2 * (copies - 1) / copies / ranks
        num_machines = max(1, ranks // self.gpus)  # of a copy
        if num_machines > 1 and self.gpus > 1:
            within = (self.gpus - 1) / self.gpus  # the parts of all ranges that a device adds up for its machine
            # The sums so far of all ranges, in float32. A machine between two others also gets its own ranges back from the last machine.
            into_machine = 4 / itemsize + (1 / num_machines if num_machines > 2 else 0.0)
        else:
            neighbours = min(ranks, self.gpus)  # ranks of a copy within a machine
            within, into_machine = (neighbours - 1) / ranks, self.gpus * (ranks - neighbours) / ranks
        if self.machines > 1:
            into_machine += self.gpus * over_copies
        else:
            within += over_copies
        return self._rate((ranks - 1) / ranks + over_copies, within=within, into_machine=into_machine)

    def _rate(self, received: float, *, within: float, into_machine: float) -> float:
        """Return the rate of a collective that ends once the slower of both kinds of links has moved its bytes; infinite if none has to.

        Args:
            received: what counts as received by a rank. All three arguments are shares of the bytes of all ranks together.
            within: what a device receives from its own machine. Without links between the devices it costs no time here: it crosses
                the links to the host, where `schedule.simulate` counts it (`through_host`).
            into_machine: what a machine receives from other machines.
        """
        within_seconds = within / self.peer if self.peer else 0.0
        network_seconds = into_machine / self.network if self.network else 0.0
        seconds = max(within_seconds, network_seconds)
        return received / seconds if seconds else float("inf")


def connect(hardware: Hardware, gpus: int, machines: int) -> tuple[Hardware, Interconnect]:
    """Return one device's share of its machine as a profile, and the links between the devices.

    Host memory is not divided, because a plan compares it with the sum over all processes of a machine.

    Args:
        hardware: profile of a machine with one device.
        gpus: devices of each machine.
        machines: number of machines.

    Raises:
        ConfigError: the profile does not describe a machine with several devices, or its network.
    """
    _require_links(hardware, gpus, machines)
    server = hardware.server
    cores, memory, bandwidth = hardware.cores, float(hardware.host_memory), hardware.host_rate
    if gpus > 1:
        cores, memory, bandwidth = int(server["cores"]), server["host_memory"], server["host_bandwidth"]
    one_share = replace(
        hardware,
        cores=max(1, cores // gpus),
        host_memory=int(memory),
        host_bandwidth={str(max(1, cores // gpus)): bandwidth / gpus},
        update_seconds={},  # measured on all cores, so unknown for a share of them
        unit_update_seconds={},
        disk_write=hardware.disk_write / gpus,
        disk_read=hardware.disk_read / gpus,
    )
    network = server["network"] if machines > 1 else 0.0
    return one_share, Interconnect(gpus, machines, peer=server.get("peer", 0.0), network=network)


def _require_links(hardware: Hardware, gpus: int, machines: int) -> None:
    """Raise ConfigError if a profile does not describe a machine with several devices, or its network."""
    server = hardware.server
    if hardware.on_host:
        raise ConfigError("gpus and nodes plan for GPUs; choose a profile of a GPU")
    if gpus > 1 and "host_bandwidth" not in server:
        raise ConfigError(
            f"the profile of {hardware.name} describes a machine with one GPU; add a server with several to a file, "
            'MACHINE.json: "server": {"host_memory": 2e12, "host_bandwidth": 4e11, "cores": 112, "peer": 3.4e11} (docs/planning.md)'
        )
    if machines > 1 and "network" not in server:
        raise ConfigError(
            f'the profile of {hardware.name} has no network; add "server": {{"network": 1e10}}, in bytes per second, to a file, '
            "MACHINE.json (docs/planning.md)"
        )
