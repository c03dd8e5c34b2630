"""Packed rows do not attend to each other in any family that supports packing; other families are rejected."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import horizon_lm
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model import attention
from horizon_lm.model.skeletons import build_skeleton
from horizon_lm.model.units import find_parts
from horizon_lm.planning.measure.model_outline import require_packable
from tests.e2e import tiny
from tests.support import tiny_models

# Convolutions and recurrent states cross the boundaries of packed rows, and some models build masks that ignore them.
REJECTED = ["opt", "qwen3_next", "gpt_oss"]  # gpt_oss but for varlen
if Version(transformers.__version__) < Version("5.24"):  # since then Falcon's masks keep rows apart
    REJECTED.append("falcon")
WITHOUT_SDPA = ("gemma2", "gpt_oss")
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3")
FIRST, LENGTH = 5, 13


def packed(seed: int) -> dict[str, torch.Tensor]:
    """Return two packed rows of two rows each. The first rows depend on ``seed``; only the second rows are
    trained on.
    """
    ids = torch.randint(3, tiny_models.VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    ids[:, :FIRST] = torch.randint(3, tiny_models.VOCABULARY, (2, FIRST), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, : FIRST + 1] = -100
    positions = torch.cat([torch.arange(FIRST), torch.arange(LENGTH - FIRST)]).expand(2, -1).clone()
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def second(family: str, attn: str, seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits of the second rows and all gradients, except for the embeddings of the first rows' tokens."""
    attention.register()
    options = {"output_router_logits": False} if family in tiny_models.MOE_WITH_AUXILIARY_LOSS else {}
    model = tiny_models.build(family, **options)
    model = horizon_lm.stream(model, precision="float32", head="whole", attn_implementation=attn)
    inputs = packed(seed)
    output = model(**inputs)
    output.loss.backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters()}
    table = next(name for name, param in model.named_parameters() if param is model.get_input_embeddings().weight)
    if not model.config.tie_word_embeddings:
        grads[table] = grads[table][inputs["input_ids"][:, FIRST:].unique()]
    return output.logits[:, FIRST:].detach(), grads


CASES = [
    (family, attn)
    for family in tiny_models.FAMILIES
    for attn in ("sdpa", "eager")
    if family not in REJECTED and not (attn == "sdpa" and family in WITHOUT_SDPA)
]


@pytest.mark.parametrize(("family", "attn"), CASES)
def test_packed_row_does_not_depend_on_the_previous_row(family: str, attn: str) -> None:
    (logits, grads), (again, other) = (second(family, attn, seed) for seed in (1, 2))
    if family in EXPERTS:  # experts compute the tokens of both rows in one batch, whose size may change the last bit
        torch.testing.assert_close(logits, again)
        torch.testing.assert_close(grads, other)
        return
    assert torch.equal(logits, again)
    for name in grads:
        assert torch.equal(grads[name], other[name]), name


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_families_that_would_leak_are_rejected(family: str) -> None:
    """Leaking families are recognized by the masks that the model builds, not by a list of names."""
    model = tiny_models.build(family)
    parts = find_parts(build_skeleton(model.config))
    used = model.config._attn_implementation
    if family in REJECTED:
        with pytest.raises(ModelNotSupportedError, match="packing is not possible: block 0"):
            require_packable(parts, used)
    else:
        require_packable(parts, used)


@pytest.mark.parametrize("family", [family for family in ("falcon", "qwen3_next") if family in REJECTED])
def test_rejected_families_do_leak(family: str) -> None:
    """This test fails once a rejection is no longer needed."""
    attn = tiny_models.build(family).config._attn_implementation
    logits, again = (second(family, attn, seed)[0] for seed in (1, 2))
    assert not torch.allclose(logits, again)


@pytest.mark.usefixtures("whole_installation")
def test_run_that_would_leak_does_not_start(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_models.build("opt", vocab_size=400).save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows())
    run = {
        "model_name_or_path": str(folder),
        "datasets": str(rows),
        "output_dir": str(tmp_path / "run"),
        "device": "cpu",
    }
    with pytest.raises(ModelNotSupportedError, match="packing is not possible"):
        horizon_lm.train({**run, "packing": True, "max_length": 64}, print_fn=lambda text: None)


@pytest.mark.usefixtures("whole_installation")
def test_batch_size_and_accumulation_give_the_same_step(tmp_path: Path) -> None:
    """8 x 1 and 1 x 8 give the same loss and gradient, bit for bit."""
    folder = tiny.save_model(tmp_path / "model")
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows(20))

    def run(name: str, rows_at_once: int, factor: int) -> list[dict[str, Any]]:
        result = horizon_lm.train(
            {
                "model_name_or_path": str(folder), "datasets": str(rows), "output_dir": str(tmp_path / name), "device": "cpu",
                "precision": "float32", "per_device_train_batch_size": rows_at_once, "max_steps": 4, "logging_steps": 1,
                "gradient_accumulation_steps": factor, "device_micro_batch_size": 2, "learning_rate": 1e-2,
            },
            print_fn=lambda text: None,
        )  # fmt: skip
        return [json.loads(line) for line in (result.output_dir / "metrics.jsonl").read_text().splitlines()]

    one, other = run("8x1", 8, 1), run("1x8", 1, 8)
    assert [(line["loss"], line["grad_norm"]) for line in one] == [(line["loss"], line["grad_norm"]) for line in other]
