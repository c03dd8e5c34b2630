"""Runs that do not train all units: those of a model in bfloat16 that are not trained have their weights alone, without fp32 masters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from horizon_lm.common.units import EMBED, block
from horizon_lm.engine.opening.model_opening import OpenRequest, open_model
from horizon_lm.errors import StreamingError
from horizon_lm.planning.arithmetic.host_memory import host_bytes
from horizon_lm.runs.checkpoints.export import export_checkpoint
from tests.e2e import tiny
from tests.e2e.resuming import SAVING, Runs
from tests.support import image_models

ONE_BLOCK = {"trainable": "language_model.layers.1.*"}  # the tower, the embedding and the head are not trained, either


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the same weights in bfloat16 and in float32."""
    folder = tmp_path_factory.mktemp("models")
    first = image_models.save_llava(folder / "bfloat16")
    image_models.save_llava(folder / "float32")
    model = AutoModelForImageTextToText.from_pretrained(first, dtype=torch.bfloat16)
    model.save_pretrained(first)
    model.float().save_pretrained(folder / "float32")
    return {name: folder / name for name in ("bfloat16", "float32")}


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows(4))
    return {
        "datasets": str(rows), "output_dir": str(tmp_path / "run"), "device": "cpu", "per_device_train_batch_size": 4, "max_steps": 3,
        "learning_rate": 1e-2, "precision": "fp32_master", **SAVING,
    }  # fmt: skip


def store_of(loop: Any) -> Any:
    return loop.model._horizon.engine.store


def counted(loop: Any) -> dict[str, int]:
    return {kind: num_bytes for kind, num_bytes in store_of(loop).num_bytes.items() if num_bytes}


@pytest.mark.parametrize("settings", [{}, ONE_BLOCK], ids=["tower", "one block"])
def test_they_have_no_masters(
    settings: dict[str, Any], base: dict[str, Any], folders: dict[str, Path], runs: Runs
) -> None:
    """All weights are trained as with the masters that the same model in float32 has."""
    outcomes = []
    for name, folder in folders.items():
        given = {
            "model_name_or_path": str(folder),
            "output_dir": f"{base['output_dir']}-{name}",
            "export_dtype": "float32",
        }
        outcomes.append(runs.train(base | given | settings)[0])
    exact, whole = runs.loops
    assert counted(exact) == host_bytes(exact.settings.plan.step)
    assert counted(whole) == host_bytes(whole.settings.plan.step)
    slabs = [slab for slab in store_of(exact).slabs if slab.has_low and slab.layout.numel]
    untrained = {slab.unit for slab in slabs if not slab.grad_layout.numel}
    assert untrained >= ({EMBED, block(2)} if settings else {block(0), block(1)})
    assert {slab.unit for slab in slabs if slab.low is None} == untrained
    without = sum(slab.own_bytes(2) for slab in slabs if slab.unit in untrained)
    assert counted(whole)["low_halves"] - counted(exact)["low_halves"] == without > 0
    assert all(
        torch.equal(store_of(exact).master(name), store_of(whole).master(name)) for name in store_of(exact).unit_of
    )
    assert outcomes[0]["model"] == outcomes[1]["model"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        ONE_BLOCK | {"optim": "muon"},
        pytest.param({"optim": "lion", "precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param({"precision": "float32", "moments": "8bit"}, marks=pytest.mark.slow),
        pytest.param({"moments": "bfloat16", "update_in_backward": True, "max_grad_norm": 0.0}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: "-".join(settings) or "tower",
)
def test_a_resume_is_exact(
    settings: dict[str, Any], base: dict[str, Any], folders: dict[str, Path], tmp_path: Path, runs: Runs
) -> None:
    given = base | settings | {"model_name_or_path": str(folders["bfloat16"])}
    expected, _ = runs.train(given | {"output_dir": str(tmp_path / "whole")})
    runs.interrupt(given, stop_after=2)
    outcome, _ = runs.train(given)
    assert outcome == expected
    export_checkpoint(Path(given["output_dir"]) / "checkpoint-2", tmp_path / "exported")
    export_checkpoint(tmp_path / "whole" / "checkpoint-2", tmp_path / "whole" / "exported")
    exported, model, before = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "exported", tmp_path / "whole" / "exported", folders["bfloat16"])
    )
    assert any("vision_tower" in name for name in before)
    assert all(torch.equal(exported[name], before[name]) for name in before if "vision_tower" in name)
    assert exported.keys() == model.keys()
    assert all(torch.equal(exported[name], model[name]) for name in model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_unit_without_masters_cannot_be_trained_later(dtype: str, folders: dict[str, Path]) -> None:
    def freeze(model: Any) -> None:
        model.model.vision_tower.requires_grad_(False)

    model = open_model(
        OpenRequest(name=folders[dtype], options={"device": "cpu", "precision": "fp32_master"}, freeze=freeze)
    )
    model.model.vision_tower.requires_grad_(True)
    ids = torch.full((1, 8), 5)
    if dtype == "float32":  # whose low halves have bits
        model(input_ids=ids, labels=ids).loss.backward()
        return
    with pytest.raises(StreamingError, match="block0: no weight of it was trained when the model was opened"):
        model(input_ids=ids, labels=ids).loss.backward()
