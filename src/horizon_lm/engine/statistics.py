"""What a streamed model holds and has moved."""

from typing import Any

from horizon_lm.engine.engine import Engine
from horizon_lm.errors import ConfigError


def _engine(model: Any) -> Engine:
    if not hasattr(model, "_horizon"):
        raise ConfigError("this needs a streamed model; call horizon_lm.stream(model) first")
    return model._horizon.engine


def synchronize(model: Any) -> None:
    """Block until every update is in ``p.data`` and every gradient in ``p.grad``.

    Reading a parameter through torch waits by itself. Memory that is reached otherwise (numpy views, raw pointers) is ready
    after this call; call it after writing there, too, and the next forward takes what was written.
    """
    engine = _engine(model)
    engine.settle()
    engine.weights_changed()


def stats(model: Any) -> dict[str, Any]:
    """Bytes and counts since the model was streamed.

    Returns:
        ``device_bytes`` and ``device_bytes_peak``: in buffers of the engine; ``device_bytes_by_kind``;
        ``host_bytes`` and ``host_bytes_by_kind``: slabs, moments and boundaries;
        ``moved_bytes``: over the link, by kind of operation and unit (``"stream_in:block0"``), in host dtypes;
        ``block_forward_rows``: rows of the batch times blocks that a block's forward was computed for.
    """
    engine = _engine(model)
    counters = engine.device.counters
    host = dict(engine.store.num_bytes)
    if engine.boundaries.num_bytes:
        host["boundaries"] = engine.boundaries.num_bytes
    return {
        "device_bytes": counters.allocated_total,
        "device_bytes_peak": counters.allocated_peak,
        "device_bytes_by_kind": {k: v for k, v in counters.allocated.items() if v},
        "host_bytes": sum(host.values()),
        "host_bytes_by_kind": host,
        "moved_bytes": dict(counters.moved),
        "block_forward_rows": engine.counts["block_forward_rows"],
    }
