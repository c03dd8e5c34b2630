"""Other optimizers as remedies for a lack of host memory."""

from dataclasses import replace
from typing import Any

from horizon_lm.common.optimizers import OPTIMIZERS, OptimizerEntry
from horizon_lm.planning.arithmetic.outline import ModelOutline
from horizon_lm.planning.arithmetic.plan import Plan, make_plan
from horizon_lm.planning.arithmetic.remedies import Remedy, _lighter_optimizers, find_remedies, smallest
from horizon_lm.planning.arithmetic.request import Limit, Machine, Request
from tests.support.handmade_outlines import BLOCK, dense, laid_out, machine

NEW = OptimizerEntry("new", "New", num_moments=0)  # a new line of the table, with the fewest moments
OUTLINE = dense()
BYTES = OUTLINE.layout.num_parameters


def plan(bytes_per_parameter: float, outline: ModelOutline = OUTLINE, **request: Any) -> Plan:
    """Return the plan of a run on a machine with so many bytes of host memory for each parameter."""
    here = Machine("here", False, machine(), [Limit("host_memory", int(bytes_per_parameter * BYTES))])
    wanted = {"per_device_train_batch_size": 1, "activation_checkpoints": "host", "optimizers": OPTIMIZERS, **request}
    return make_plan(outline, Request(**wanted), here, priced=False)


def remedies(bytes_per_parameter: float, **request: Any) -> list[Remedy]:
    return find_remedies(plan(bytes_per_parameter, **request), lambda **_: OUTLINE)


def test_the_lightest_of_all_is_found() -> None:
    """Two bytes for a weight and one for a moment, which no other optimizer of the table reaches."""
    (found,) = remedies(3.8)
    assert found.settings == {
        "moments": "8bit", "precision": "bf16", "update_in_backward": True, "max_grad_norm": 0, "optim": "lion",
    }  # fmt: skip
    assert "Lion instead of AdamW, with fewer moments: one per parameter" in found.cost
    assert found.plan.step.settings.optimizer == OPTIMIZERS["lion"]


def test_changes_of_bytes_come_before_another_optimizer() -> None:
    assert all("optim" not in each.settings for each in remedies(9.0))


def test_each_optimizer_of_the_table_is_offered() -> None:
    """Those with fewer bytes come later, and of two with equal bytes the one whose gradients need not be kept."""
    heavy = Request(optimizer=OptimizerEntry("heavy", "Heavy", num_moments=3), optimizers={"new": NEW, **OPTIMIZERS})
    assert [each.settings["optim"] for each in _lighter_optimizers(heavy)] == ["adamw", "muon", "lion", "new"]
    assert not list(_lighter_optimizers(replace(heavy, optimizer=NEW)))


def test_a_new_optimizer_of_the_table_is_offered() -> None:
    (found,) = remedies(2.8, optimizers={"new": NEW, **OPTIMIZERS})
    assert found.settings["optim"] == "new"
    assert smallest(plan(2.0, optimizers={"new": NEW, **OPTIMIZERS})).settings["optim"] == "new"


def test_nothing_is_updated_in_a_backward_pass_whose_gradients_are_needed_later() -> None:
    for room in (3.8, 5.0, 6.0, 7.0, 8.5):
        for each in remedies(room):
            request = each.plan.request
            assert request.optimizer.updates_in_backward or not request.update_in_backward
    assert "update_in_backward" not in smallest(plan(2.0, optimizers={}, optimizer=OPTIMIZERS["muon"])).settings


def test_a_lighter_optimizer_is_not_exchanged() -> None:
    assert all("optim" not in each.settings for each in remedies(5.0, optimizer=OPTIMIZERS["lion"]))


def test_matrices_are_needed_to_orthogonalize_them() -> None:
    def offered(outline: ModelOutline) -> set[str]:
        """Return the optimizers that the plan names where gradients are needed for skipped steps."""
        only = {"muon": OPTIMIZERS["muon"]}
        made = plan(5.7, outline, skips_steps=True, precision="bf16", moments="8bit", optimizers=only)
        return {each.settings.get("optim", "") for each in find_remedies(made, lambda **_: outline)}

    layout = laid_out(OUTLINE.num_blocks)
    matrices = {name: (1, BLOCK, 1) for unit in layout.blocks for name in layout.units[unit].layout}
    assert offered(replace(OUTLINE, layout=replace(layout, matrices=matrices))) == {"muon"}
    assert not offered(OUTLINE)
