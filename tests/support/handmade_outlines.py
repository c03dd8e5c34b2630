"""Handmade outlines and machines with known figures."""

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from horizon_lm.common.units import EMBED, HEAD, OUTER, Unit, block
from horizon_lm.memory.layout.model import ModelLayout
from horizon_lm.memory.layout.ranks import WHOLE
from horizon_lm.memory.layout.units import StorageLayout, UnitLayout
from horizon_lm.planning.arithmetic.catalog import Hardware
from horizon_lm.planning.arithmetic.outline import BlockKind, Footprint, HeadCosts, Linear, ModelOutline, Work

# The shape of Qwen2.5-7B.
BLOCK, TABLE, HIDDEN, VOCABULARY, ATTENTION = 233_057_792, 152_064 * 3584, 3584, 152_064, 3584


def laid_out(
    num_blocks: int = 28, tied: bool = False, trained: Callable[[Unit], bool] = lambda unit: True,
    tensors: Mapping[str, int] | None = None, codecs: Mapping[str, Any] | None = None,
) -> ModelLayout[StorageLayout]:  # fmt: skip
    """Return the layout of a decoder with these tensors in each block, and their number of elements, instead of a single one."""
    of_block = {"weight": BLOCK} if tensors is None else tensors
    shapes: dict[Unit, dict[str, tuple[int, ...]]] = {
        block(index): {f"{block(index)}.{name}": (numel,) for name, numel in of_block.items()}
        for index in range(num_blocks)
    }
    table = (VOCABULARY, HIDDEN)
    shapes |= {EMBED: {"table": table}, HEAD: {} if tied else {"projection": table}, OUTER: {"norm": (HIDDEN,)}}
    units = {
        unit: UnitLayout(StorageLayout, unit, of_unit, codecs or {}, (), WHOLE, is_table=unit == EMBED)
        for unit, of_unit in shapes.items()
    }
    for unit, slabs in units.items():
        slabs.lay_out_grads(slabs.layout if trained(unit) else ())
    return ModelLayout(units, num_blocks, VOCABULARY, HIDDEN, tied)


def dense(num_blocks: int = 28, length: int = 4096, tied: bool = False, compute_bytes: int = 2) -> ModelOutline:
    """Return a decoder in which only matrix products and attention take time."""

    def work(products: float, attention: float) -> Linear[Work]:
        one = Work(products=products, attention=attention)
        return Linear(one, one * 2)

    head = HeadCosts(
        Linear(12 * VOCABULARY, 24 * VOCABULARY), forward=work(2.0 * TABLE, 0.0), backward=work(4.0 * TABLE, 0.0)
    )
    forward, attention = 2.0 * BLOCK * length, 2.0 * length * length * ATTENTION
    return ModelOutline(
        name="by hand",
        layout=laid_out(num_blocks, tied),
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
