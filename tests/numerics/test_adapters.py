"""PEFT's adapters on a streamed model: their gradients are those of plain PEFT, and the base costs no gradients."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="needs the whole installation")

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import horizon_lm
from horizon_lm.common.units import OUTER, block
from horizon_lm.errors import ConfigError, StreamingError
from horizon_lm.memory.layout.slabs import padded
from horizon_lm.model.adapters import Adapters
from horizon_lm.model.block_template import structure_key
from tests.seams.compare import difference
from tests.support import tiny_models
from tests.support.adapted_models import KINDS, MIXTURES, adapted
from tests.support.thinned_cases import thinned

FAMILIES = ("llama", "qwen2", "gemma2", "gpt2", "phi3", "mixtral", "qwen3_moe", "granite")
CASES = [
    (family, kind) for family, kind in itertools.product(FAMILIES, KINDS) if kind != "experts" or family in MIXTURES
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "kind"),
    thinned(
        CASES,
        every=5,
        keep=[case for case in CASES if case[0] == "llama"] + [(family, "experts") for family in MIXTURES],
    ),
)
def test_gradients_of_adapters_are_bit_equal(family: str, kind: str) -> None:
    plain, model = adapted(family, kind), horizon_lm.stream(adapted(family, kind), precision="float32")
    assert model._horizon.engine.parts.adapters
    for step in range(2):  # the second accumulates on the first
        for each in (plain, model):
            torch.manual_seed(step)
            each.train()(**tiny_models.batch(seed=step)).loss.backward()
        grads = [{n: p.grad for n, p in each.named_parameters() if p.requires_grad} for each in (plain, model)]
        assert all(grad is not None for grad in grads[0].values())
        assert difference(*grads, 0.0) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "kind"),
    thinned(
        zip(FAMILIES, ("dropout", "rslora", "dora", "mixed", "lora", "experts", "experts", "mixed"), strict=True),
        every=5,
    ),
)
def test_twenty_steps_equal_torch(family: str, kind: str) -> None:
    """The same adapters follow from our AdamW as from PEFT with torch's, and the base is not changed."""
    plain, model = adapted(family, kind), horizon_lm.stream(adapted(family, kind), precision="float32")
    before = {name: param.detach().clone() for name, param in model.named_parameters() if not param.requires_grad}
    trained = [param for param in plain.parameters() if param.requires_grad]
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01}
    pairs = ((plain, torch.optim.AdamW(trained, **settings)), (model, horizon_lm.AdamW(model, **settings)))
    for step in range(20):
        losses = []
        for each, optimizer in pairs:
            torch.manual_seed(step)
            loss = each.train()(**tiny_models.batch(seed=step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        assert losses[1] == pytest.approx(losses[0], rel=3e-6), step
    horizon_lm.synchronize(model)
    for name, param in model.named_parameters():
        if name in before:
            assert torch.equal(param, before[name]), name
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", ["lm_head", "norm", "input_layernorm", "mlp"])
def test_modules_to_save(module: str) -> None:
    """Modules that are trained as a whole beside the adapters, and what is computed with both switched off."""

    def build() -> Any:
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=[module])
        return get_peft_model(tiny_models.build("llama"), config)

    plain, model = build(), horizon_lm.stream(build(), precision="float32")
    for each in (plain, model):
        each(**tiny_models.batch()).loss.backward()
    grads = [{n: p.grad for n, p in each.named_parameters() if p.requires_grad} for each in (plain, model)]
    assert any("modules_to_save" in name for name in grads[0])
    assert difference(*grads, 0.0) is None
    for param in (p for each in (plain, model) for n, p in each.named_parameters() if "modules_to_save" in n):
        param.data.mul_(1.5)
    with torch.no_grad():
        assert float(model(**tiny_models.batch()).loss) == pytest.approx(
            float(plain(**tiny_models.batch()).loss), rel=1e-6
        )
        with plain.disable_adapter(), model.disable_adapter():
            assert float(model(**tiny_models.batch()).loss) == pytest.approx(
                float(plain(**tiny_models.batch()).loss), rel=1e-6
            )


@pytest.mark.filterwarnings("ignore")
def test_shared_templates_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing every block with the first one's adapter settings, as a shared template would, changes the gradients."""
    plain, model = adapted("llama", "mixed"), horizon_lm.stream(adapted("llama", "mixed"), precision="float32")
    layers = [[m for m in each.modules() if hasattr(m, "scaling")] for each in model._horizon.engine.parts.blocks]
    for modules in layers[1:]:
        for first, layer in zip(layers[0], modules, strict=True):
            monkeypatch.setattr(layer, "scaling", first.scaling)
    for each in (plain, model):
        each(**tiny_models.batch()).loss.backward()
    grads = [{n: p.grad for n, p in each.named_parameters() if p.requires_grad} for each in (plain, model)]
    assert difference(*grads, 0.0) is not None


@pytest.mark.filterwarnings("ignore")
def test_traffic_of_adapters() -> None:
    """The base moves in at most twice a step and never out; resident blocks move in once for all steps."""
    for resident, loads in ((0, 2), (4, 0)):
        model = horizon_lm.stream(
            adapted("llama", num_hidden_layers=4), precision="float32", resident_blocks=resident,
            activation_checkpoints="host",
        )  # fmt: skip
        optimizer = horizon_lm.AdamW(model, lr=1e-3)
        engine = model._horizon.engine
        for step in range(3):
            before = dict(engine.device.counters.moved)
            model(**tiny_models.batch(seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            moved = {op: n - before.get(op, 0) for op, n in engine.device.counters.moved.items()}
        blocks = sum(moved.get(f"stream_in:block{u}", 0) for u in range(4))
        assert blocks == loads * sum(engine.store.units[block(u)].plain.weights.nbytes for u in range(4))
        assert not any(n for op, n in moved.items() if op.startswith("stream_out:block"))
        assert moved["stream_out:outer"] == engine.store.units[OUTER].plain.grads.nbytes
        assert moved["stream_in:outer"] == engine.store.units[OUTER].plain.weights.nbytes


@pytest.mark.filterwarnings("ignore")
def test_host_bytes_of_a_frozen_base() -> None:
    """2 bytes a parameter of the base, 16 a parameter of the adapters: fp32 masters, gradients and moments."""
    model = horizon_lm.stream(adapted("llama"), precision="fp32_master")
    optimizer = horizon_lm.AdamW(model, lr=1e-3)
    model(**tiny_models.batch()).loss.backward()
    optimizer.step()
    trained = sum(padded(param.numel()) for param in model.parameters() if param.requires_grad)
    kinds = horizon_lm.stats(model)["host_bytes_by_kind"]
    total = sum(padded(param.numel()) for param in model.parameters())
    page = 4096 * 8
    assert kinds["weights"] == pytest.approx(2 * total, abs=page)
    assert kinds["low_halves"] == pytest.approx(2 * trained, abs=page)
    assert kinds["grads"] == pytest.approx(4 * trained, abs=page)
    assert kinds["moments"] == pytest.approx(8 * trained, abs=page)


@pytest.mark.filterwarnings("ignore")
def test_blocks_below_the_first_adapter_are_computed_once() -> None:
    model = adapted("llama", num_hidden_layers=4)
    for name, param in model.named_parameters():
        if any(f".layers.{u}." in name for u in (0, 1)):
            param.requires_grad_(False)
    model = horizon_lm.stream(model, precision="float32", resident_blocks=0, activation_checkpoints="host")
    model(**tiny_models.batch(rows=3)).loss.backward()
    engine = model._horizon.engine
    loads = [
        engine.device.counters.moved[f"stream_in:block{u}"] / engine.store.units[block(u)].plain.weights.nbytes
        for u in range(4)
    ]
    assert loads == [1, 1, 2, 2]
    assert engine.counts["block_forward_rows"] == 3 * 6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["lora", "dora", "experts"])
def test_adapted_blocks_are_planned_once(kind: str) -> None:
    """PEFT's layers know their own names, which make no difference; two ranks of adapters do."""
    family = "mixtral" if kind == "experts" else "llama"
    blocks = horizon_lm.stream(adapted(family, kind), precision="float32")._horizon.blocks.blocks
    assert len({structure_key(block.module) for block in blocks}) == 1
    mixed = horizon_lm.stream(adapted("llama", "mixed"), precision="float32")._horizon.blocks.blocks
    assert len({structure_key(block.module) for block in mixed}) > 1


def test_a_frozen_base_stays_frozen() -> None:
    """It has no fp32 master, so training it would lose bits."""
    model = horizon_lm.stream(adapted("llama"), precision="fp32_master")
    next(param for name, param in model.named_parameters() if "base_layer" in name).requires_grad_(True)
    with pytest.raises(StreamingError, match="unfreeze its weights before"):
        model(**tiny_models.batch()).loss.backward()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", {"q_proj", "v_proj"}), ("gpt2", {"c_attn"}), ("mixtral", {"q_proj", "v_proj"}), ("phi3", {"qkv_proj", "o_proj"}),
        ("gpt_oss", {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)  # fmt: skip
def test_layers_without_a_setting(family: str, names: set[str]) -> None:
    """A run that names no layers adapts those of PEFT's choice, or those of attention if PEFT has no choice for the model."""
    model = Adapters().add_to(tiny_models.build(family), draw=True)
    assert {
        name.rpartition(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora_A" in name
    } == names


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("settings", "task", "message"),
    [
        (
            {"num_hidden_layers": 4},
            "CAUSAL_LM",
            r"no place for, .*layers\.3.* does not belong to a LlamaForCausalLM of this base",
        ),
        (
            {"num_hidden_layers": 1},
            "CAUSAL_LM",
            r"lacks tensors, .*layers\.1.* does not belong to a LlamaForCausalLM of this base",
        ),
        (
            {"hidden_size": 16},
            "CAUSAL_LM",
            r"adapter: PEFT cannot add .*size mismatch for .*q_proj.*; give them the base",
        ),
        ({}, "SEQ_CLS", r"adapter has adapters and a head of its own for SEQ_CLS"),
    ],
    ids=["more layers", "fewer layers", "another size", "a classifier"],
)
def test_adapters_of_another_base_are_rejected(
    settings: dict[str, Any], task: str, message: str, tmp_path: Path
) -> None:
    """PEFT takes what fits, and leaves other layers without adapters."""
    tiny_models.build("llama").save_pretrained(tmp_path / "base")
    tiny_models.build("llama", **settings).save_pretrained(tmp_path / "other")
    auto = AutoModelForSequenceClassification if task == "SEQ_CLS" else AutoModelForCausalLM
    config = LoraConfig(task_type=task, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(auto.from_pretrained(tmp_path / "other"), config).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"

    def name_base(base: str) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(tmp_path / base)}))

    name_base("base")
    with pytest.raises(ConfigError, match=message):
        horizon_lm.from_pretrained(tmp_path / "adapter", device="cpu")
    if task == "CAUSAL_LM":
        name_base("other")
        horizon_lm.from_pretrained(tmp_path / "adapter", device="cpu")
