"""Handmade outlines and machines with known figures."""

from math import inf
from typing import Any

from horizon_lm.planning.catalog import Hardware
from horizon_lm.planning.model_sizes import ModelSizes
from horizon_lm.planning.outline import BlockKind, Footprint, HeadCosts, Linear, ModelOutline, Work
from horizon_lm.units import EMBED, HEAD, OUTER, block

# The shape of Qwen2.5-7B.
BLOCK, TABLE, HIDDEN, VOCABULARY, ATTENTION = 233_057_792, 152_064 * 3584, 3584, 152_064, 3584


def dense(num_blocks: int = 28, length: int = 4096, tied: bool = False, compute_bytes: int = 2) -> ModelOutline:
    """Return a decoder in which only matrix products and attention take time."""
    sizes = ModelSizes(
        units={
            **{block(index): [BLOCK] for index in range(num_blocks)},
            EMBED: [TABLE], HEAD: [] if tied else [TABLE], OUTER: [HIDDEN],
        },
        num_blocks=num_blocks,
        vocabulary=VOCABULARY,
        hidden=HIDDEN,
        tied=tied,
    )  # fmt: skip

    def work(products: float, attention: float) -> Linear[Work]:
        one = Work(products=products, attention=attention)
        return Linear(one, one * 2)

    head = HeadCosts(
        Linear(12 * VOCABULARY, 24 * VOCABULARY), forward=work(2.0 * TABLE, 0.0), backward=work(4.0 * TABLE, 0.0)
    )
    forward, attention = 2.0 * BLOCK * length, 2.0 * length * length * ATTENTION
    return ModelOutline(
        name="by hand",
        sizes=sizes,
        trained=sizes,
        active=num_blocks * BLOCK + TABLE,
        length=length,
        compute_bytes=compute_bytes,
        kinds=[
            BlockKind(
                range(num_blocks),
                footprint=Linear(Footprint(10**9, 12 * 10**8), Footprint(2 * 10**9, 24 * 10**8)),
                forward_peak=Linear(3 * 10**8, 6 * 10**8),
                forward=work(forward, attention),
                recompute=work(forward, attention),
                backward=work(2 * forward, 2.5 * attention),
            )
        ],
        shared=Linear(0, 0),
        heads=dict.fromkeys(("chunked", "compiled", "whole"), head),
        attention="varlen",
    )


def machine(**changes: Any) -> Hardware:
    """Return a server whose device memory is infinitely fast."""
    settings: dict[str, Any] = {
        "name": "by hand", "device": "cuda", "gpu": "", "device_memory": 140 * 10**9, "host_memory": 10**12, "cores": 16,
        "matmul": {"bfloat16": 600e12, "float32": 60e12}, "attention": {"bfloat16": 600e12, "float32": 60e12},
        "device_bandwidth": inf, "op_seconds": 0.0, "link_in": 55e9, "link_out": 55e9, "link_both": 110e9,
        "host_bandwidth": {"16": 200e9},
    }  # fmt: skip
    return Hardware(**settings | changes)
