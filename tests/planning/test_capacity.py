"""The planned device capacity equals the bytes allocated by the engine."""

import itertools

import pytest
import torch

import horizon_lm
from horizon_lm.errors import DoesNotFitError
from horizon_lm.memory.layout.buffers import BufferOptions, BufferSettings, BufferTable, buffer_bytes
from horizon_lm.model.laid_out import model_layout
from horizon_lm.model.units import find_parts
from horizon_lm.planning.arithmetic.budgets import _named_items
from tests.support import tiny_models
from tests.support.thinned_cases import thinned


@pytest.mark.parametrize(
    ("family", "precision", "head", "boundaries", "micro_batch_size", "resident_blocks", "resident_graphs"),
    [
        *thinned(itertools.product(
            ("llama", "gpt2", "mixtral", "falcon"), ("float32", "fp32_master"), ("chunked", "whole"),
            ("device", "host"), (None, 2), (0,), (0,),
        )),
        *thinned(itertools.product(
            ("llama", "gpt2"), ("fp32_master",), ("chunked",), ("device", "host"), (None,), (1, 2), (0, 1)
        )),
    ],
)  # fmt: skip
def test_planned_capacity_equals_allocated_bytes(
    family: str, precision: str, head: str, boundaries: str, micro_batch_size: int | None, resident_blocks: int,
    resident_graphs: int,
) -> None:  # fmt: skip
    model = tiny_models.build(family)
    settings = {
        "precision": precision,
        "head": head,
        "activation_checkpoints": boundaries,
        "resident_blocks": resident_blocks,
        "resident_graphs": resident_graphs,
    }
    num_blocks = model.config.num_hidden_layers
    inputs = tiny_models.batch(rows=2, length=8)
    inputs["input_ids"] = torch.arange(16).view(2, 8) + 3  # all tokens differ, which is the worst case for the table
    streamed = horizon_lm.stream(model, device_micro_batch_size=micro_batch_size, **settings)
    streamed(**inputs).loss.backward()

    options = BufferOptions(
        compute_dtype="float32",
        grad_dtype="float32" if precision == "float32" else "bfloat16",
        in_micro_batches=micro_batch_size is not None,
        chunked_head=head == "chunked",
    )
    layout = model_layout(find_parts(tiny_models.build(family))).tiled(None)
    buffers = buffer_bytes(
        layout,
        BufferTable(layout, options),
        BufferSettings(
            options,
            tokens=16,
            offloaded=(num_blocks - resident_graphs) if boundaries == "host" else 0,
            resident=resident_blocks,
        ),
    )
    needed = sum(buffers.values())
    assert horizon_lm.stats(streamed)["device_bytes_peak"] == needed

    enforced = horizon_lm.stream(
        tiny_models.build(family), device_memory=needed, device_micro_batch_size=micro_batch_size, **settings
    )
    enforced(**inputs).loss.backward()
    too_small = horizon_lm.stream(
        tiny_models.build(family), device_memory=needed - 1, device_micro_batch_size=micro_batch_size, **settings
    )
    with pytest.raises(DoesNotFitError, match="do not fit into the device capacity"):
        too_small(**inputs).loss.backward()


def test_a_buffer_without_a_text_is_named_by_its_kind() -> None:
    (item,) = _named_items({"spare_slots": 5}, {})
    assert (item.name, item.bytes, item.note) == ("spare slots", 5, "")
