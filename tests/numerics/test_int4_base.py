"""A base in INT4 of compressed-tensors: the numbers of plain Hugging Face with the weights that plain torch decodes, bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import horizon_lm
from horizon_lm.errors import ConfigError, ModelNotSupportedError
from horizon_lm.memory.codecs.int4 import Int4
from horizon_lm.model import hf_config
from horizon_lm.model.quantization import expected_codecs, take_quantization
from horizon_lm.model.skeletons import build_skeleton
from horizon_lm.model.units import find_parts
from tests.support import tiny_models
from tests.support.int4_folders import (
    KIMI_IGNORES,
    SIZES,
    change_config,
    decoded_state,
    plain_model,
    quantization_config,
    quantize,
    save_int4,
)

pytestmark = pytest.mark.filterwarnings("ignore")
LORA = {"r": 4, "target_modules": ["o_proj", "kv_b_proj", "q_proj"], "init_lora_weights": False}
NAME = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns a folder of a family, written once."""
    found: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in found:
            found[family] = save_int4(family, tmp_path_factory.mktemp(family) / "model")
        return found[family]

    return find


def opened(folder: Path, **options: Any) -> Any:
    return horizon_lm.from_pretrained(folder, "cpu", "float32", head="whole", **options)


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    return peft.get_peft_model(model.train(), peft.LoraConfig(**LORA))


def trained(model: Any, optimizer: Any, steps: int = 3) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Return the losses and the gradients of some steps."""
    losses, grads = [], []
    for step in range(steps):
        loss = model(**tiny_models.batch(seed=step)).loss
        loss.backward()
        losses.append(loss.detach())
        grads.append({name: param.grad.clone() for name, param in model.named_parameters() if param.requires_grad})
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads


@pytest.mark.parametrize(
    ("family", "tile"), [("llama", None), ("deepseek_v3", None), ("deepseek_v3", 1), ("deepseek_v3", 3)]
)
def test_adapters_have_the_bits_of_plain_hugging_face(folders: Any, family: str, tile: int | None) -> None:
    folder = folders(family)
    plain = adapted(tiny_models.attending_as_streamed(plain_model(folder)))
    model = adapted(opened(folder, expert_tile=tile))
    store = model.base_model.model._horizon.engine.store
    before = {name: store.packed(name).clone() for name in store.codecs}
    assert len(before) == (3 * 7 if family == "llama" else 3 * 5 + 3 + 2 * 5)
    # The fused optimizer of torch has the bits of ours.
    expected = trained(
        plain, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, fused=True)
    )
    got = trained(model, horizon_lm.AdamW(model, lr=1e-2))
    assert all(map(torch.equal, got[0], expected[0]))
    assert len({float(loss) for loss in got[0]}) == 3
    for ours, theirs in zip(got[1], expected[1], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert all(grad.abs().sum() > 0 for grad in ours.values())
    horizon_lm.synchronize(model.base_model.model)
    assert all(torch.equal(store.packed(name), data) for name, data in before.items())
    assert (store.codecs.keys() >= {"model.layers.1.mlp.experts.gate_up_proj"}) == (family == "deepseek_v3")


@pytest.mark.parametrize(
    "codec", [Int4(64), Int4(None), Int4(32, torch.float16), Int4(32, torch.float32), Int4(None, torch.float32)]
)
def test_groups_rows_and_scales(tmp_path: Path, codec: Int4) -> None:
    """All sizes of groups and dtypes of scales decode as plain torch, and as compressed-tensors opened by transformers."""
    folder = save_int4("llama", tmp_path / "model", codec)
    model = opened(folder)
    expected, found = decoded_state(folder), dict(model.named_parameters())
    codecs = model._horizon.engine.store.codecs
    assert len(codecs) == (3 * 6 if codec.group_size == 64 else 3 * 7)  # 96 columns are no groups of 64
    assert set(codecs.values()) == {codec}
    for name in codecs:
        assert expected[name].dtype == codec.scale_dtype
        assert torch.equal(found[name].decode(), expected[name].float())


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_decoded_weights_are_those_that_transformers_opens(folders: Any, family: str) -> None:
    """With ``dequantize``, all weights can be trained."""
    pytest.importorskip("compressed_tensors")
    from transformers import CompressedTensorsConfig

    config = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    theirs = AutoModelForCausalLM.from_pretrained(folders(family), dtype=torch.bfloat16, **config).state_dict()
    model = horizon_lm.from_pretrained(folders(family), "cpu", "bf16", **config)
    assert not model._horizon.engine.store.codecs
    plain = plain_model(folders(family), torch.bfloat16).state_dict()
    for name, param in model.named_parameters():
        assert param.requires_grad
        assert torch.equal(param, theirs[name]), name
        assert torch.equal(param, plain[name]), name


def test_experts_alone_as_in_kimi_k2(tmp_path: Path) -> None:
    """The tensors decide which weights are quantized; before there are any, the names that the config leaves out do."""
    tiny_models.build("deepseek_v3", **SIZES["deepseek_v3"]).to(torch.bfloat16).save_pretrained(tmp_path)
    quantize(tmp_path, experts_only=True, shape_dtype=torch.int32)
    found = opened(tmp_path)._horizon.engine.store.codecs
    names = [f"model.layers.{u}.mlp.experts.{name}" for u in (1, 2) for name in ("gate_up_proj", "down_proj")]
    assert sorted(found) == sorted(names)
    config = hf_config.read_config(tmp_path, trust_remote_code=False)
    quantization = take_quantization(config)
    assert quantization is not None
    assert quantization["ignore"] == KIMI_IGNORES
    parts = find_parts(build_skeleton(config))
    assert expected_codecs(parts, quantization) == found
    group = quantization["config_groups"]["group_0"]
    by_target = quantization | {"ignore": [], "config_groups": {"a": group | {"targets": [r"re:.*mlp\.experts.*"]}}}
    assert expected_codecs(parts, by_target) == found
    everything = expected_codecs(parts, quantization | {"ignore": []} | {"config_groups": {"a": group}})
    assert everything.keys() > found.keys()


def test_the_type_of_kimi_k2(folders: Any, tmp_path: Path) -> None:
    """Its config names a type that transformers does not have, with code of its own. The message has the remedy, which works."""
    (tmp_path / "model.safetensors").hardlink_to(folders("deepseek_v3") / "model.safetensors")
    settings = json.loads((folders("deepseek_v3") / "config.json").read_text())
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    for changes in ({"model_type": "kimi_k2", "auto_map": code}, {"model_type": "kimi_k2"}):
        (tmp_path / "config.json").write_text(json.dumps(settings | changes))
        with pytest.raises(ConfigError, match=r"set model_type: deepseek_v3 in config\.json, and remove its auto_map"):
            opened(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert opened(tmp_path)._horizon.engine.store.codecs
    for changes in ({"model_type": [1], "auto_map": code}, {"model_type": "kimi_k2", "architectures": ["NoSuchModel"]}):
        (tmp_path / "config.json").write_text(json.dumps(settings | changes))
        with pytest.raises(ConfigError, match=r"no usable config\.json") as raised:
            opened(tmp_path)
        assert "set model_type" not in str(raised.value)


Tensors = dict[str, torch.Tensor]


def _drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def _put(name: str, change: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: change(tensors)})


HOSTILE: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "no scales": (_drop(f"{NAME}.weight_scale"), "weight_scale is missing"),
    "no words": (_drop(f"{NAME}.weight_packed"), "lacks 1 of .* parameters"),
    "too few scales": (_put(f"{NAME}.weight_scale", lambda t: t[f"{NAME}.weight_scale"][:, :2].clone()), "weight_scale is BF16 of shape"),
    "transposed scales": (_put(f"{NAME}.weight_scale", lambda t: torch.ones(3, 2, dtype=torch.bfloat16)), "weight_scale is BF16 of shape"),
    "scales of integers": (_put(f"{NAME}.weight_scale", lambda t: t[f"{NAME}.weight_scale"].to(torch.int32)), "weight_scale is I32 of shape"),
    "scales of 8 bits": (_put(f"{NAME}.weight_scale", lambda t: t[f"{NAME}.weight_scale"].to(torch.float8_e4m3fn)), "weight_scale is F8_E4M3 of"),
    "NaN": (_put(f"{NAME}.weight_scale", lambda t: t[f"{NAME}.weight_scale"] * float("nan")), "weight_scale has 192 NaN"),
    "infinity": (_put(f"{NAME}.weight_scale", lambda t: t[f"{NAME}.weight_scale"] / 0), "weight_scale has 192 NaN or infinite"),
    "fewer rows": (_put(f"{NAME}.weight_packed", lambda t: t[f"{NAME}.weight_packed"][:60].clone()), "weight_scale is BF16 of shape"),
    "fewer words": (_put(f"{NAME}.weight_packed", lambda t: t[f"{NAME}.weight_packed"][:, :9].clone()), "cannot be in INT4"),
    "words of 8 bits": (_put(f"{NAME}.weight_packed", lambda t: t[f"{NAME}.weight_packed"].view(torch.uint8)), r"weight_packed is U8 of shape \(64, 48\)"),
    "flat words": (_put(f"{NAME}.weight_packed", lambda t: t[f"{NAME}.weight_packed"].view(-1)), r"weight_packed is I32 of shape \(768,\)"),
    "no words at all": (_put(f"{NAME}.weight_packed", lambda t: torch.empty(0, dtype=torch.int32)), "weight_scale is BF16"),
    "another shape": (_put(f"{NAME}.weight_shape", lambda t: torch.tensor([64, 95])), r"weight_shape is \[64, 95\], but .* the shape \[64, 96\]"),
    "a shape of text": (_put(f"{NAME}.weight_shape", lambda t: torch.full((300,), 7, dtype=torch.uint8)), r"weight_shape is U8 of shape \(300,\), but two integers"),
    "a shape of floats": (
        _put(f"{NAME}.weight_shape", lambda t: torch.tensor([64.0, 96.0])),
        r"weight_shape is F32 of shape \(2,\), but two integers",
    ),
    "zero points": (_put(f"{NAME}.weight_zero_point", lambda t: torch.zeros(8, 3, dtype=torch.int32)), "is there with .*weight_zero_point"),
    "an order of columns": (_put(f"{NAME}.weight_g_idx", lambda t: torch.arange(96)), "is there with .*weight_g_idx"),
    "both": (_put(f"{NAME}.weight", lambda t: torch.ones(64, 96, dtype=torch.bfloat16)), r"is there with .*down_proj\.weight,"),
    "a quantized head": (
        lambda tensors: tensors.update({"lm_head.weight_packed": torch.zeros(96, 8, dtype=torch.int32), "lm_head.weight_scale": torch.ones(96, 2, dtype=torch.bfloat16)})
        or tensors.pop("lm_head.weight"),
        "lm_head.weight is quantized, but only the weights of blocks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", HOSTILE)
def test_hostile_tensors_are_rejected(folders: Any, tmp_path: Path, how: str) -> None:
    damage, message = HOSTILE[how]
    tensors = load_file(folders("llama") / "model.safetensors")
    damage(tensors)
    (tmp_path / "config.json").write_text((folders("llama") / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=message) as raised:
        opened(tmp_path)
    assert len(str(raised.value)) < 600


def test_a_truncated_file_is_rejected(folders: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folders("llama") / "config.json").read_text())
    data = (folders("llama") / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read .*bytes instead of"):
        opened(tmp_path)


def test_experts_of_different_formats_are_not_joined(tmp_path: Path) -> None:
    """One expert with scales in another dtype, and one that is not quantized."""
    folder, name = save_int4("deepseek_v3", tmp_path / "model"), "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    other = tensors | {f"{name}_scale": tensors[f"{name}_scale"].float()}
    plain = {key: each for key, each in tensors.items() if not key.startswith(name)}
    plain[name] = torch.ones(32, 64, dtype=torch.bfloat16)
    for changed in (other, plain):
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError, match=r"cannot be joined to model\.layers\.1\.mlp\.experts\.gate_up_proj"):
            opened(folder)


def _group(**changes: Any) -> dict[str, Any]:
    config = quantization_config()
    return {"config_groups": {"group_0": config["config_groups"]["group_0"] | changes}}


FP8 = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "zero points": (quantization_config(symmetric=False), "4 bits, int, by group, with zero points"),
    "an order": (quantization_config(actorder="group"), "with columns in the actorder group"),
    "another order": (quantization_config(actorder=True), "with columns in the actorder True"),
    "8 bits": (quantization_config(num_bits=8), "8 bits, int, by group"),
    "floats": (quantization_config(type="float"), "4 bits, float, by group"),
    "a tensor": (quantization_config(strategy="tensor"), "4 bits, int, by tensor"),
    "groups of 20": (quantization_config(20), "by group of 20 columns, which are no multiple of 8"),
    "groups of nothing": (quantization_config(group_size=None, strategy="group"), "by group of None columns"),
    "groups of text": (quantization_config(group_size="32; rm", strategy="group"), "by group of 32; rm columns"),
    "one code a byte": (quantization_config() | {"format": "int-quantized"}, "in the format int-quantized"),
    "2:4": (quantization_config() | {"format": "marlin-24"}, "in the format marlin-24"),
    "its own format": (quantization_config() | _group(format="naive-quantized"), "in the format naive-quantized"),
    "mixed": (
        quantization_config() | {"format": "mixed-precision", "config_groups": _group(format="pack-quantized")["config_groups"] | {"b": FP8}},
        r"2 groups of weights \(4 bits, int, by group; 8 bits, float, by block\)",
    ),
    "rotations": (quantization_config() | {"transform_config": {"config_groups": {"R1": {}}}}, "has changed its weights by a transform_config"),
    "sparsity": (quantization_config() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "has changed its weights by a sparsity_config"),
}  # fmt: skip


@pytest.mark.parametrize("how", OTHERS)
def test_other_schemes_are_rejected_by_name(folders: Any, tmp_path: Path, how: str) -> None:
    quantization, message = OTHERS[how]
    (tmp_path / "config.json").write_text((folders("llama") / "config.json").read_text())
    change_config(tmp_path, quantization_config=quantization)
    (tmp_path / "model.safetensors").hardlink_to(folders("llama") / "model.safetensors")
    with pytest.raises(ModelNotSupportedError, match=message) as raised:
        opened(tmp_path)
    assert "or the int4 of compressed-tensors" in str(raised.value)


def test_settings_that_change_no_value(folders: Any, tmp_path: Path) -> None:
    """Two groups of the same format, the order in which GPTQ went through columns, and quantized activations."""
    weights = quantization_config(actorder="weight")["config_groups"]["group_0"]
    group = weights | {"format": "pack-quantized", "input_activations": {"num_bits": 8, "type": "int", "dynamic": True}}
    quantization = quantization_config() | {
        "config_groups": {"a": group, "b": group},
        "sparsity_config": {"format": "dense"},
    }
    settings = json.loads((folders("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": quantization}))
    (tmp_path / "model.safetensors").hardlink_to(folders("llama") / "model.safetensors")
    batch = tiny_models.batch()
    assert torch.equal(opened(tmp_path)(**batch).loss, opened(folders("llama"))(**batch).loss)


def test_a_pattern_of_targets_that_takes_too_long_is_rejected() -> None:
    parts = find_parts(tiny_models.build("llama"))
    group = quantization_config()["config_groups"]["group_0"] | {"targets": [r"re:(.*.*)*.*(.*.*)*!"]}
    with pytest.raises(ConfigError, match="quantization_config"):
        expected_codecs(parts, quantization_config() | {"config_groups": {"a": group}})
