"""Adapters on a frozen base that is quantized in host memory: folders as published, and weights quantized while they are read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.thinned_cases import thinned

pytest.importorskip("peft", reason="needs the whole installation")

from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import horizon_lm
from horizon_lm.device.cuda import CudaDevice
from horizon_lm.errors import ConfigError, ModelNotSupportedError, StreamingError
from horizon_lm.memory.codecs.fp8 import Fp8
from horizon_lm.memory.kernels import decoding
from horizon_lm.model.quantization import four_bits
from tests.seams.compare import difference
from tests.support import tiny_models
from tests.support.emulated_gpu import emulated_gpu
from tests.support.quantized_folders import (
    adapter_folder,
    adapters,
    dequantized,
    opened,
    save_by_bitsandbytes,
    save_plain,
    save_published,
)
from tests.support.quantized_tensors import published as components_of

CASES = [
    ("llama", "4bit"), ("llama", "nf4"), ("qwen2", "nested"), ("mixtral", "4bit"), ("gpt_oss", "mxfp4"), ("llama", "fp8"),
    ("qwen3_moe", "fp8"), ("deepseek_v3", "fp8"), ("gpt2", "4bit"), ("llama", "int4"), ("deepseek_v3", "int4"),
]  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that returns a folder of published weights, written once."""
    folders: dict[tuple[str, str], Path] = {}

    def find(family: str, kind: str) -> Path:
        if (family, kind) not in folders:
            folders[family, kind] = save_published(family, kind, tmp_path_factory.mktemp(f"{family}-{kind}") / "model")
        return folders[family, kind]

    return find


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_published_folder_computes_what_its_library_decodes(published: Any, family: str, kind: str) -> None:
    folder = published(family, kind)
    model = opened(folder, kind)
    plain = dequantized(folder, kind, model)
    with torch.no_grad():
        got, expected = (each.eval()(**tiny_models.batch()).loss for each in (model, plain))
    assert float(got) == pytest.approx(float(expected), rel=3e-6)
    store = model._horizon.engine.store
    assert set(store.codecs) <= set(dict(model.named_parameters()))
    assert len(store.codecs) >= 6
    assert store.num_bytes["packed_weights"] > 0


def with_adapters(folder: Path, kind: str, tmp_path: Path, **config: Any) -> tuple[Any, Any]:
    """Return a plain and a streamed PEFT model with the same adapters, which are not zero."""
    base = opened(folder, kind)
    torch.manual_seed(1)
    plain = get_peft_model(dequantized(folder, kind, base), LoraConfig(**config))
    with torch.no_grad():
        for name, param in plain.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.02)
    plain.peft_config["default"].base_model_name_or_path = str(folder)
    plain.save_pretrained(tmp_path / "adapters")
    if kind == "4bit":
        return plain, horizon_lm.from_pretrained(tmp_path / "adapters", "cpu", "float32", load_in_4bit=True)
    return plain, horizon_lm.from_pretrained(tmp_path / "adapters", "cpu", "float32")


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_codes_that_are_stored_in_another_dtype(published: Any, tmp_path: Path, storage: torch.dtype) -> None:
    """With ``bnb_4bit_quant_storage``, which FSDP wants, the bytes of codes have the dtype of other weights."""
    folder = shutil.copytree(published("llama", "nf4"), tmp_path / "stored")
    tensors = load_file(folder / "model.safetensors")
    codes = [name for name in tensors if f"{name}.absmax" in tensors]
    for name in codes:
        tensors[name] = tensors[name].view(-1).view(storage).view(-1, 1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    expected, found = (dict(opened(each, "nf4").named_parameters()) for each in (published("llama", "nf4"), folder))
    assert codes
    assert all(torch.equal(found[name].decode(), expected[name].decode()) for name in codes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "kind", "adapter"),
    [
        ("qwen2", "nested", "mixed"), ("gpt_oss", "mxfp4", "lora"), ("qwen3_moe", "fp8", "lora"), ("llama", "int4", "dora"),
        *thinned(
            [
                ("mixtral", "4bit", "lora"), ("deepseek_v3", "int4", "lora"), ("llama", "4bit", "lora"),
                ("deepseek_v3", "fp8", "mixed"), ("llama", "nf4", "dora"),
            ],
            every=5,
        ),
    ],
)  # fmt: skip
def test_adapters_on_a_quantized_base(published: Any, tmp_path: Path, family: str, kind: str, adapter: str) -> None:
    """Gradients are those of plain PEFT on the decoded weights, bit for bit, twenty steps stay equal, and no byte of the base
    changes.
    """
    targets = ["q_proj", "o_proj"] if family != "deepseek_v3" else ["o_proj", "kv_b_proj"]
    plain, model = with_adapters(published(family, kind), kind, tmp_path, **adapters(adapter, target_modules=targets))
    store = model.base_model.model._horizon.engine.store
    before = {name: store.packed(name).clone() for name in store.codecs}
    assert before
    for each in (plain, model):
        each.train()(**tiny_models.batch()).loss.backward()
    grads = [{n: p.grad for n, p in each.named_parameters() if p.requires_grad} for each in (plain, model)]
    assert difference(*grads, 0.0) is None
    trained = [param for param in plain.parameters() if param.requires_grad]
    pairs = ((plain, torch.optim.AdamW(trained, lr=1e-2)), (model, horizon_lm.AdamW(model, lr=1e-2)))
    for step in range(20):
        losses = []
        for each, optimizer in pairs:
            optimizer.zero_grad()
            loss = each(**tiny_models.batch(seed=step)).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        assert losses[1] == pytest.approx(losses[0], rel=1e-5), step
    horizon_lm.synchronize(model.base_model.model)
    assert all(torch.equal(store.packed(name), data) for name, data in before.items())


@pytest.mark.filterwarnings("ignore")
def test_checked_gradients(published: Any) -> None:
    """The reference is computed with decoded weights. Of quantized ones, the store has no others."""
    model = horizon_lm.from_pretrained(published("llama", "nf4"), "cpu", "float32", check_gradients=2)
    get_peft_model(model, LoraConfig(target_modules="all-linear"))
    model(**tiny_models.batch()).loss.backward()
    assert model._horizon.blocks.gradient_check is None


def test_placeholders(published: Any, tmp_path: Path) -> None:
    """Quantized weights keep name, shape and dtype; `tests/engine/test_packed_parameters.py` reads and writes their values."""
    model = opened(published("llama", "4bit"), "4bit")
    name = "model.layers.1.mlp.down_proj.weight"
    weight = model.get_parameter(name)
    assert weight.shape == (64, 96)
    assert weight.dtype == torch.float32
    assert not weight.requires_grad
    assert sum(param.numel() for param in model.parameters()) == model.num_parameters()
    assert model.state_dict()[name] is weight
    assert "down_proj" in repr(weight)
    with pytest.raises(StreamingError, match=r"down_proj.weight is quantized and cannot be pickled"):
        torch.save(weight, tmp_path / "w")
    with pytest.raises(StreamingError, match="cannot be trained"):
        weight.requires_grad_(True)
    decoded = weight.decode()
    assert decoded.shape == weight.shape
    assert decoded.dtype == weight.dtype
    model.save_pretrained(tmp_path / "plain", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    assert torch.equal(plain.get_parameter(name), decoded)
    assert dict(horizon_lm.named_weights(model))[name].equal(decoded)
    tokens = tiny_models.batch()["input_ids"][:1, :5]
    settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    assert torch.equal(model.generate(tokens, **settings), plain.generate(tokens, **settings))


def damage(tensors: dict[str, torch.Tensor], kind: str, how: str) -> str:
    """Damage a tensor of a folder, and return its name."""
    part = {"nf4": "absmax", "mxfp4": "_scales", "fp8": "_scale_inv", "int4": "_scale"}[kind]
    name = next(name for name in tensors if name.endswith(part))
    if how == "missing":
        del tensors[name]
    elif how == "truncated":
        tensors[name] = tensors[name].reshape(-1)[:-1].clone()
    elif how == "mislabelled":
        tensors[name] = tensors[name].to(torch.float64 if kind == "int4" else torch.float16)
    else:
        tensors[name].view(-1)[1] = 255 if kind == "mxfp4" else float("nan")
    return name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["missing", "truncated", "mislabelled", "not finite"])
@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "nf4"), ("gpt_oss", "mxfp4"), ("llama", "fp8"), ("llama", "int4")]
)
def test_damaged_scales_are_rejected(published: Any, tmp_path: Path, family: str, kind: str, how: str) -> None:
    folder = published(family, kind)
    tensors = load_file(folder / "model.safetensors")
    name = damage(tensors, kind, how)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        opened(tmp_path, kind)


@pytest.mark.filterwarnings("ignore")
def test_a_mislabelled_table_is_rejected(published: Any, tmp_path: Path) -> None:
    folder = published("llama", "nf4")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("quant_map"))
    tensors[name] = tensors[name].flip(0)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="quant_map is not the table of"):
        opened(tmp_path, "nf4")


@pytest.mark.filterwarnings("ignore")
def test_tiles_of_two_matrices_are_rejected(tmp_path: Path) -> None:
    """Gate and up of 24 rows have one row of tiles of 32 each. Joined, they would have two, but others: the sizes do not show it."""
    save_plain("qwen3_moe", tmp_path, moe_intermediate_size=24)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        parts = components_of(Fp8((32, 32)), weight) if ".experts." in name else {"weight": weight}
        tensors |= {name: parts["weight"]}
        tensors |= {f"{name}_scale_inv": parts["weight_scale_inv"]} if len(parts) > 1 else {}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"cannot be joined to model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        opened(tmp_path, "fp8")


@pytest.mark.filterwarnings("ignore")
def test_transposed_layers_are_rejected(tmp_path: Path) -> None:
    """bitsandbytes keeps the transpose of GPT-2's weights, which is not seen in the shape of a square one."""
    save_plain("gpt2", tmp_path / "model")
    with pytest.raises(ConfigError, match="transpose"):
        opened(save_by_bitsandbytes(tmp_path / "model", nested=False), "nf4")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantized by gptq"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quantized by bitsandbytes in 8 bits"),
        ({"quant_method": "fp8"}, "without weight_block_size"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "0 groups of weights"),
        ({"quant_method": "fp8", "weight_block_size": ["a", 0]}, "two numbers are needed"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}}, "4 bits, int"),
    ],
)  # fmt: skip
def test_other_formats_are_rejected(tmp_path: Path, quantization: dict[str, Any], message: str) -> None:
    save_plain("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((ConfigError, ModelNotSupportedError), match=message):
        opened(tmp_path, "other")


@pytest.mark.parametrize(
    "state", [b"{", b'{"shape": [64, 64]}', b" " * 5000, b'{"shape": "x", "blocksize": 3, "quant_type": "nf4"}']
)
def test_damaged_descriptions_are_rejected(published: Any, tmp_path: Path, state: bytes) -> None:
    folder = published("llama", "nf4")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "quant_state" in name)
    tensors[name] = torch.tensor(list(state), dtype=torch.uint8)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="is damaged"):
        opened(tmp_path, "nf4")


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_missing_description_is_named(published: Any, tmp_path: Path, kind: str) -> None:
    folder = published("llama", "nf4")
    tensors = load_file(folder / "model.safetensors")
    del tensors[next(name for name in tensors if "quant_state" in name)]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["bnb_4bit_quant_type"] = kind
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"has no quant_state\.bitsandbytes__{kind}; download it again"):
        opened(tmp_path, "nf4")


def test_names_that_are_left_out(tmp_path: Path) -> None:
    """Names and patterns of modules that are not quantized; what is no pattern is a name."""
    save_plain("llama", tmp_path)
    quantization = four_bits() | {"llm_int8_skip_modules": ["model.layers.1", "re:.*k_proj", "(", 7]}
    model = horizon_lm.from_pretrained(tmp_path, "cpu", "float32", quantization_config=quantization)
    found = set(model._horizon.engine.store.codecs)
    assert "model.layers.0.self_attn.q_proj.weight" in found
    assert not {name for name in found if ".layers.1." in name or "k_proj" in name}


def _query(family: str) -> list[str]:
    return ["q_a_proj"] if family == "deepseek_v3" else ["q_proj"]


def train(model: Any, steps: int = 2) -> list[torch.Tensor]:
    """Train adapters, and return them."""
    optimizer = horizon_lm.AdamW(model, lr=1e-2)
    for step in range(steps):
        model.train()(**tiny_models.batch(seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    horizon_lm.synchronize(model.base_model.model)
    return [param.detach().clone() for param in model.parameters() if param.requires_grad]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "kind"),
    thinned([("gpt_oss", "mxfp4"), ("llama", "4bit"), ("qwen3_moe", "fp8"), ("deepseek_v3", "int4")]),
)
def test_an_emulated_gpu(
    published: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    """Codes cross the link, and are decoded on the device, without the host waiting for it."""
    monkeypatch.setattr(decoding, "has_triton", lambda: False)  # its kernels need a real GPU
    folder = adapter_folder(published(family, kind), tmp_path, target_modules=_query(family))
    options: dict[str, Any] = {"precision": "float32", "attn_implementation": "eager"}
    options |= {"load_in_4bit": True} if kind == "4bit" else {}
    expected = train(horizon_lm.from_pretrained(folder, "cpu", **options))
    with emulated_gpu() as gpu:
        model = horizon_lm.from_pretrained(folder, CudaDevice(), **options, compile=False)
        got = train(model)
        gpu.waits.clear()
        with torch.no_grad():
            model(**tiny_models.batch())
        waits = list(gpu.waits)
        assert all(map(torch.equal, got, expected))
        assert not [wait for wait in waits if "codecs" in wait or "cuda_link" in wait], waits
