"""The hardware: streams, memory and transfers of a device, page-locking of host memory, and the host threads of the optimizer."""
