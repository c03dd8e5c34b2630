"""Adapters that PEFT adds to a streamed model, removes from it, switches, and merges into it: equal to plain PEFT."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from horizon_lm.common.units import OUTER
from tests.support.thinned_cases import covering, thinned

pytest.importorskip("peft", reason="needs the whole installation")

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

import horizon_lm
from horizon_lm.errors import IgnoredArgumentWarning, StreamingError
from tests.seams.compare import difference
from tests.support import tiny_models

pytestmark = pytest.mark.filterwarnings("ignore")
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
OTHER: dict[str, Any] = {"r": 2, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"]}


def fill(model: Any, name: str = "default") -> Any:
    """Give adapters values that are not zero, the same each time."""
    torch.manual_seed(len(name))
    with torch.no_grad():
        for path, param in model.named_parameters():
            if f"lora_B.{name}" in path:
                param.normal_(std=0.02)
    return model


def adapted(model: Any, **config: Any) -> Any:
    torch.manual_seed(1)
    return fill(get_peft_model(model, LoraConfig(**(LORA | config))))


def pair(precision: str = "float32", family: str = "llama") -> tuple[Any, Any]:
    """Return a plain model, and the same streamed, without adapters."""
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if family == "gpt2" else {}
    plain, model = (tiny_models.build(family, **no_dropout) for _ in range(2))
    return plain, horizon_lm.stream(model, precision=precision)


def gradients(model: Any, step: int = 0) -> dict[str, Any]:
    """Return the loss and the gradients of a batch, and clear them."""
    torch.manual_seed(step)
    loss = model.train()(**tiny_models.batch(seed=step)).loss
    loss.backward()
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def logits(model: Any) -> torch.Tensor:
    batch = tiny_models.batch()
    with torch.no_grad():
        return model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def assert_same(plain: Any, model: Any) -> None:
    """Compare logits, gradients and parameters, bit for bit."""
    assert difference(logits(plain), logits(model), 0.0) is None
    expected = gradients(plain)
    assert expected
    assert difference(expected, gradients(model), 0.0) is None
    weights = [dict(each.named_parameters()) for each in (plain, model)]
    assert difference(*[{n: p.detach().clone() for n, p in each.items()} for each in weights], 0.0) is None


@pytest.mark.parametrize(
    ("config", "family"),
    thinned(
        itertools.product(
            [{}, {"use_dora": True}, {"rank_pattern": {r"layers\.0\..*": 2}}], ("llama", "gpt2", "mixtral")
        ),
        every=2,
    ),
    ids=str,
)
def test_added_to_a_streamed_model(family: str, config: dict[str, Any]) -> None:
    """Gradients are those of plain PEFT, and the base keeps its memory."""
    if family == "mixtral":
        config = config | {"target_modules": ["q_proj", "v_proj"]}
    plain, model = pair(family=family)
    engine = model._horizon.engine
    places = {unit: slabs.plain.weights.data_ptr() for unit, slabs in engine.store.units.items()}
    plain, model = adapted(plain, **config), adapted(model, **config)
    assert_same(plain, model)
    assert model._horizon.engine is not engine
    slabs = model._horizon.engine.store.units
    assert [unit for unit in places if slabs[unit].plain.weights.data_ptr() != places[unit]] == [OUTER]


@pytest.mark.parametrize("precision", ["fp32_master", "bf16"])
def test_added_before_and_after(precision: str) -> None:
    """In 16 bits, too, adapters train alike, and take the same memory."""
    models = [tiny_models.build("llama").bfloat16() for _ in range(2)]
    early = horizon_lm.stream(adapted(models[0]), precision=precision)
    late = adapted(horizon_lm.stream(models[1], precision=precision))
    assert difference(gradients(early), gradients(late), 0.0) is None
    for model in (early, late):
        optimizer = horizon_lm.AdamW(model, lr=1e-2)
        for step in range(3):
            model(**tiny_models.batch(seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    states = [each.get_base_model().state_dict() for each in (early, late)]
    assert difference(*states, 0.0) is None
    assert horizon_lm.stats(early)["host_bytes_by_kind"] == horizon_lm.stats(late)["host_bytes_by_kind"]


def test_masters_of_the_base_are_kept() -> None:
    """Low halves that have bits are not thrown away, and adapters that are trained keep theirs."""
    model = adapted(horizon_lm.stream(tiny_models.build("llama"), precision="fp32_master"))
    store = model._horizon.engine.store
    expected = tiny_models.build("llama").get_parameter("model.layers.0.mlp.up_proj.weight")
    assert torch.equal(store.master("model.layers.0.mlp.up_proj.base_layer.weight"), expected)
    optimizer = horizon_lm.AdamW(model, lr=1e-2)
    model(**tiny_models.batch()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    horizon_lm.synchronize(model)
    name = "model.layers.0.mlp.up_proj.lora_A.default.weight"
    master = store.master(name)
    assert not torch.equal(master, master.bfloat16().float())
    model.add_adapter("other", LoraConfig(**OTHER))
    assert torch.equal(model._horizon.engine.store.master(name), master)


def test_added_deleted_switched_and_disabled() -> None:
    """PEFT's calls, one after the other, on adapters of different ranks."""
    plain, model = pair()
    plain, model = adapted(plain), adapted(model)
    for each in (plain, model):
        torch.manual_seed(2)
        each.add_adapter("other", LoraConfig(**OTHER))
        fill(each, "other")
    assert_same(plain, model)
    with plain.disable_adapter(), model.disable_adapter():
        base = logits(model)
        assert torch.equal(logits(plain), base)
    assert not torch.equal(logits(model), base)
    for each in (plain, model):
        each.set_adapter("other")
    assert torch.equal(logits(plain), logits(model))
    for each in (plain, model):
        each.delete_adapter("default")
    assert_same(plain, model)
    assert len(model._horizon.engine.parts.adapter_names) == 2 * 2 * len(model._horizon.engine.parts.blocks)


def test_the_adapter_to_train_is_switched_between_trainings() -> None:
    """Each adapter is trained by an optimizer of its own; the other one is not changed."""
    trained = []
    for each in pair():
        model = adapted(each)
        torch.manual_seed(2)
        model.add_adapter("other", LoraConfig(**OTHER))
        fill(model, "other")
        for name in ("default", "other", "default"):
            model.set_adapter(name)
            params = [param for param in model.parameters() if param.requires_grad]
            streams = hasattr(model, "_horizon")
            kind: Any = horizon_lm.AdamW(model, lr=1e-2) if streams else torch.optim.AdamW(params, lr=1e-2)
            for step in range(2):
                model(**tiny_models.batch(seed=step)).loss.backward()
                kind.step()
                kind.zero_grad()
        trained.append({name: param.detach().clone() for name, param in model.named_parameters()})
    assert difference(*trained, 1e-4) is None


def test_opened_from_a_folder(tmp_path: Path) -> None:
    adapted(tiny_models.build("llama")).save_pretrained(tmp_path)
    plain, model = pair()
    opened = [PeftModel.from_pretrained(each, tmp_path, is_trainable=True) for each in (plain, model)]
    assert_same(*opened)
    opened[1].save_pretrained(tmp_path / "again")
    assert torch.equal(
        logits(PeftModel.from_pretrained(tiny_models.build("llama"), tmp_path / "again")), logits(opened[0])
    )
    for each in opened:
        each.load_adapter(tmp_path, "second")
        each.set_adapter("second")
    assert torch.equal(logits(opened[0]), logits(opened[1]))


@pytest.fixture
def any_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers take the installed PEFT: 5.24 wants one for its own methods that has not been published."""
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda min_version: None)


@pytest.mark.usefixtures("any_peft")
def test_transformers_own_adapters(tmp_path: Path) -> None:
    plain, model = pair()
    for each in (plain, model):
        torch.manual_seed(1)
        each.add_adapter(LoraConfig(**LORA))
        fill(each)
    assert_same(plain, model)
    for each in (plain, model):
        each.disable_adapters()
    assert torch.equal(logits(plain), logits(model))
    for each in (plain, model):
        each.enable_adapters()
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("adapter*")} == {"adapter_config.json", "adapter_model.safetensors"}
    assert torch.equal(logits(plain), logits(model))


@pytest.mark.usefixtures("any_peft")
def test_transformers_own_method_gets_all_arguments_of_save_pretrained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = pair()
    model.add_adapter(LoraConfig(**LORA))
    taken: dict[str, Any] = {}
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", lambda model, folder, **kwargs: taken.update(kwargs))
    given = {"is_main_process": False, "state_dict": {}, "push_to_hub": True, "max_shard_size": "1GB", "variant": "fp16", "token": "none"}  # fmt: skip
    model.save_pretrained(tmp_path, **given)
    own = {"save_peft_format": True, "save_original_format": True, "distributed_checkpoint": False}
    assert taken == given | own
    with pytest.warns(IgnoredArgumentWarning, match="dtype=torch.bfloat16 has no effect on adapters"):
        model.save_pretrained(tmp_path, dtype=torch.bfloat16)


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({}, {}),
    "dora": ({"use_dora": True}, {}),
    "safely": ({}, {"safe_merge": True}),
    "dora, safely": ({"use_dora": True}, {"safe_merge": True}),
}


@pytest.mark.parametrize(("kind", "late"), covering(KINDS, (False, True)))
def test_merged_and_unmerged(kind: str, late: bool) -> None:
    """The weights are those of plain PEFT, bit for bit; blocks that are resident are loaded again."""
    config, options = KINDS[kind]
    plain = adapted(tiny_models.build("llama"), **config)
    settings: dict[str, Any] = {"precision": "float32", "resident_blocks": 2, "activation_checkpoints": "host"}
    if late:
        model = adapted(horizon_lm.stream(tiny_models.build("llama"), **settings), **config)
    else:
        model = horizon_lm.stream(adapted(tiny_models.build("llama"), **config), **settings)
    separate = logits(model)
    for each in (plain, model):
        each.merge_adapter(**options)
    assert torch.equal(logits(plain), logits(model))
    assert not torch.equal(logits(model), separate)
    for each in (plain, model):
        each.unmerge_adapter()
    assert_same(plain, model)


TOKENS = {"trainable_token_indices": {"embed_tokens": [1, 5]}}
UNUSED = KINDS | {"tokens": (TOKENS, {}), "tokens, safely": (TOKENS, {"safe_merge": True})}


@pytest.mark.parametrize(("kind", "precision"), covering(UNUSED, ("float32", "fp32_master")))
def test_merged_before_any_use(kind: str, precision: str) -> None:
    """The base has all bits of the merge, although the model has not noticed its new adapters yet."""
    config, options = UNUSED[kind]
    plain = adapted(tiny_models.build("llama"), **config)
    used, model = (
        adapted(horizon_lm.stream(tiny_models.build("llama"), precision=precision), **config) for _ in range(2)
    )
    logits(used)
    found = []
    for each in (used, model):
        each.merge_adapter(**options)
        store = each.base_model.model._horizon.engine.store
        found.append({f"base_model.model.{name}": store.master(name) for name in store.unit_of})
        unloaded = each.merge_and_unload(**options)
        store = unloaded._horizon.engine.store
        found.append({name: store.master(name) for name in store.unit_of})
    assert difference(found[:2], found[2:], 0.0) is None
    if precision == "float32":
        plain.merge_adapter(**options)
        assert difference({name: param.data for name, param in plain.named_parameters()}, found[0], 0.0) is None


def test_a_merged_model_is_saved_as_a_plain_one(tmp_path: Path) -> None:
    """Also if it was not used between adding and merging, and by other code that writes a frozen base in bf16."""
    plain = adapted(tiny_models.build("llama")).merge_and_unload()
    model = adapted(horizon_lm.stream(tiny_models.build("llama"), precision="float32")).merge_and_unload()
    model.save_pretrained(tmp_path)
    opened = type(plain).from_pretrained(tmp_path)
    assert difference(dict(plain.named_parameters()), dict(opened.named_parameters()), 0.0) is None
    frozen = horizon_lm.stream(adapted(tiny_models.build("llama")), precision="fp32_master")
    name, param = next((n, p) for n, p in frozen.named_parameters() if "base_layer" in n)
    param.data.mul_(2)
    expected = adapted(tiny_models.build("llama")).get_parameter(name).bfloat16() * 2
    logits(frozen)
    assert torch.equal(frozen.get_parameter(name), expected)


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp32_master"])
def test_merged_for_good(precision: str) -> None:
    """A model without adapters is left, which is streamed. In 16 bits it is that of plain PEFT with a base in bf16."""
    plain = adapted(tiny_models.build("llama").bfloat16())
    early = adapted(tiny_models.build("llama").bfloat16())
    if precision == "float32":
        plain, early = plain.float(), early.float()
    model = horizon_lm.stream(early, precision=precision)
    merged = [each.merge_and_unload() for each in (plain, model)]
    weights = [dict(each.named_parameters()) for each in merged]
    if precision == "bf16":  # its adapters have 16 bits
        assert difference(*[{n: p.detach().float() for n, p in each.items()} for each in weights], 5e-3) is None
    else:
        assert difference(*[{n: p.detach().clone() for n, p in each.items()} for each in weights], 0.0) is None
    assert not merged[1]._horizon.engine.parts.adapters
    ids = tiny_models.batch()["input_ids"]
    with torch.no_grad():
        got = merged[1].eval()(input_ids=ids).logits
        assert (
            difference(merged[0].float().eval()(input_ids=ids).logits, got, 5e-3 if precision == "bf16" else 1e-3)
            is None
        )


def test_what_was_made_before_the_adapters_is_rejected() -> None:
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
    optimizer = horizon_lm.AdamW(model, lr=1e-2)
    loss = model(**tiny_models.batch()).loss
    peft = get_peft_model(model, LoraConfig(**LORA))
    assert peft._horizon is not None
    for use in (optimizer.step, optimizer.zero_grad, loss.backward):
        with pytest.raises(StreamingError, match="create the optimizer after the adapters"):
            use()
    fill(peft)(**tiny_models.batch()).loss.backward()
    with pytest.raises(StreamingError, match="create the optimizer after the adapters"):
        optimizer.landed_grad_norm()  # which our trainer logs before a step
    peft.add_adapter("other", LoraConfig(**OTHER))
    with pytest.raises(StreamingError, match="gradients are held"):
        peft(**tiny_models.batch())
    peft.zero_grad()
    peft(**tiny_models.batch())


def test_other_changes_of_the_structure_are_still_rejected() -> None:
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
    block = model.model.layers[0]
    block.mlp.up_proj = torch.nn.Linear(*reversed(block.mlp.up_proj.weight.shape), bias=False)
    with pytest.raises(StreamingError, match="Change the model first"):
        model(**tiny_models.batch())


def test_switching_in_lock_step() -> None:
    """Without gradients, each function sees its own switches; with gradients, a switch that others would see is rejected."""
    plain, model = (adapted(each) for each in pair())
    batches = [tiny_models.batch(seed=step) for step in range(3)]

    def against_base(each: Any, batch: Any) -> torch.Tensor:
        with torch.no_grad(), each.disable_adapter():
            reference = each(**batch).loss
        return each(**batch).loss - 0.5 * reference

    for each in (plain, model):
        each.train()
    expected = [against_base(plain, batch) for batch in batches]
    got = horizon_lm.run_together([partial(against_base, model, batch) for batch in batches])
    sum(expected).backward()
    sum(got).backward()
    assert [float(each) for each in got] == pytest.approx([float(each) for each in expected], rel=3e-6)
    grads = [{n: p.grad for n, p in each.named_parameters() if p.grad is not None} for each in (plain, model)]
    assert difference(*grads, 1e-5) is None
    model.zero_grad()
    model.add_adapter("other", LoraConfig(**OTHER))

    def with_other(batch: Any) -> torch.Tensor:
        model.set_adapter("other")
        loss: torch.Tensor = model(**batch).loss
        model.set_adapter("default")
        return loss

    with pytest.raises(StreamingError, match="around run_together"):
        horizon_lm.run_together([partial(with_other, batch) for batch in batches])
