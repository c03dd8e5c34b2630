"""Transfers of host memory that cannot be page-locked: through staging buffers, which the host copies into and out of."""

from dataclasses import replace

from horizon_lm.plan.hardware import Hardware


def staged(hardware: Hardware) -> Hardware:
    """The rates of a machine whose transfers are staged.

    The host copies at half the rate at which it reads and writes memory. On the way in, one buffer is filled while the other
    is sent; on the way out, a buffer is emptied once it has come. Both directions share the host's memory.
    """
    copying = hardware.host_rate / 2
    return replace(
        hardware,
        link_in=min(hardware.link_in, copying),
        link_out=1 / (1 / hardware.link_out + 1 / copying),
        link_both=min(hardware.link_both, copying),
    )
