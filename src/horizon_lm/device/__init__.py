"""The hardware: streams, memory and transfers of a device, and the host threads that run the optimizer."""
