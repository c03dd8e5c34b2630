"""A model with quantized weights looks like one to other code: to transformers, PEFT, TRL, accelerate and scripts."""

import copy
import fnmatch
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.thinned_cases import thinned

pytest.importorskip("peft", reason="needs the whole installation")
pytest.importorskip("bitsandbytes", reason="needs the whole installation")

import bitsandbytes
import peft
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

import horizon_lm
from horizon_lm.errors import HorizonError, ModelNotSupportedError, StreamingError
from horizon_lm.memory.codecs.bnb4bit import Bnb4Bit
from tests.seams.compare import difference
from tests.support import tiny_models
from tests.support.peft_methods import WORK, lora, method
from tests.support.quantized_folders import dequantized, opened, save_published

pytestmark = pytest.mark.filterwarnings("ignore")

# Attributes and classes by which code finds out that a model is quantized.
_ASKED = re.compile(
    r"is_loaded_in_[48]bit|\bis_quantized\b|quantization_method|hf_quantizer|Linear4bit|Linear8bitLt|Params4bit|is_4bit_serializable|_is_quantized\b"
)
# The files that ask, and what a streamed model with quantized weights does there.
_LOADING, _LAYERS = (
    "while plain models are opened",
    "PEFT's layers of 4 bits: as on plain 4 bits, and merging is rejected",
)
ASKERS = {
    "transformers/trainer_utils.py": "adapters are required: test_training_without_adapters_is_rejected",
    "transformers/trainer.py": "the model is not moved; several devices of a process are rejected anyway",
    "transformers/modeling_utils.py": "test_attributes; save_pretrained, to() and dequantize() are those of the streamed model",
    "transformers/generation/utils.py": "nothing is compiled",
    "transformers/integrations/*": _LOADING,
    "transformers/quantizers/*": _LOADING,
    "transformers/distributed/*": _LOADING,
    "transformers/cli/*": _LOADING,
    "transformers/utils/*": _LOADING,
    "transformers/*.py": _LOADING,
    "trl/trainer/*.py": "adapters are cast to bfloat16: tests/trainer/test_adapters.py, test_a_quantized_base",
    "trl/experimental/*": "weights are prepared for training: test_a_script_for_4_bits",
    "trl/generation/vllm_generation.py": "horizon_lm.trainer rejects use_vllm",
    "trl/scripts/*": _LOADING,
    "peft/utils/other.py": "prepare_model_for_kbit_training: test_a_script_for_4_bits",
    "peft/peft_model.py": "inputs need no gradients; parameters are counted: test_a_script_for_4_bits",
    "peft/mixed_model.py": "as peft/peft_model.py",
    "peft/utils/loftq_utils.py": "test_codes_are_not_read_or_replaced",
    "peft/utils/*": "weights are decoded: test_methods_on_4_bits",
    "peft/import_utils.py": "whether bitsandbytes is installed",
    "peft/tuners/*": _LAYERS,
    "accelerate/accelerator.py": "asked only of models with a device map, which a streamed model does not have",
    "accelerate/big_modeling.py": "cpu_offload and dispatch_model are rejected",
    "accelerate/hooks.py": "cpu_offload and dispatch_model are rejected",
    "accelerate/utils/*": _LOADING,
}


def test_all_code_that_asks_is_known() -> None:
    """A new version of these packages may ask at a new place."""
    unknown = []
    for package in ("transformers", "trl", "peft", "accelerate"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        root = Path(str(spec.origin)).parent
        # Not the models of transformers, which ask whether flash-attn needs another dtype; it gets that of computations here.
        for path in (
            each for each in root.rglob("*.py") if root / "models" not in each.parents or package != "transformers"
        ):
            name = path.relative_to(root.parent).as_posix()
            if _ASKED.search(path.read_text("utf-8")) and not any(fnmatch.fnmatch(name, each) for each in ASKERS):
                unknown.append(name)
    assert unknown == []


KINDS = {"4bit": "llama", "nested": "llama", "mxfp4": "gpt_oss", "fp8": "llama", "int4": "llama"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the folder of a kind, written once. bitsandbytes decodes rows of 128 right on all CPUs."""
    written: dict[str, Path] = {}

    def find(kind: str) -> Path:
        if kind not in written:
            folder = tmp_path_factory.mktemp(kind) / "model"
            sizes = {} if kind in ("mxfp4", "fp8", "int4") else {"hidden_size": 128, "intermediate_size": 128}
            written[kind] = save_published(KINDS[kind], kind, folder, **sizes)
        return written[kind]

    return find


def plain_in_4_bits(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=in_4_bits(), **({"dtype": torch.float32} | options)
    )


def in_4_bits() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


ATTRIBUTES = ("is_quantized", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit", "is_4bit_serializable")


def looks(model: Any) -> dict[str, Any]:
    """Return what other code sees of a model."""
    quantizer = getattr(model, "hf_quantizer", None)
    return {
        **{name: getattr(model, name, None) for name in ATTRIBUTES},
        "trainable": quantizer and quantizer.is_trainable,
        "config": json.loads(model.config.to_json_string(use_diff=False)).get("quantization_config"),
        "same config": quantizer and quantizer.quantization_config is model.config.quantization_config,
        "4-bit layers": [n for n, m in model.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)],
        "settings of layers": [(m.compute_dtype, m.weight.quant_type, m.weight.compress_statistics)
                               for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)],
        "linear layers": [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)],
        "parameters": model.num_parameters(),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["4bit", "nested", "int4"])
def test_attributes_are_those_of_plain_models(folders: Callable[[str], Path], kind: str) -> None:
    folder = folders(kind)
    if kind == "4bit":
        plain, ours = (
            plain_in_4_bits(folder),
            horizon_lm.from_pretrained(folder, "cpu", quantization_config=in_4_bits()),
        )
    else:
        plain, ours = AutoModelForCausalLM.from_pretrained(folder), horizon_lm.from_pretrained(folder, "cpu")
    expected, found = looks(plain), looks(ours)
    if kind == "int4":  # transformers counts packed numbers, and has another class of layers
        del expected["parameters"], found["parameters"], expected["linear layers"], found["linear layers"]
    assert found == expected
    assert found["is_quantized"] is True


@pytest.mark.parametrize(("kind", "method"), [("mxfp4", "mxfp4"), ("fp8", "fp8")])
def test_attributes_of_formats_that_plain_models_decode_on_a_cpu(
    folders: Callable[[str], Path], kind: str, method: str
) -> None:
    found = looks(horizon_lm.from_pretrained(folders(kind), "cpu"))
    assert found["is_quantized"] is True
    assert found["quantization_method"] == method
    assert found["is_loaded_in_4bit"] is None
    assert found["trainable"]
    assert found["config"]["quant_method"] == method
    assert found["4-bit layers"] == []


def test_a_model_without_quantized_weights_has_no_such_attribute(folders: Callable[[str], Path]) -> None:
    found = looks(horizon_lm.from_pretrained(folders("4bit"), "cpu"))
    assert not any(found[name] for name in (*ATTRIBUTES, "trainable", "config", "4-bit layers"))
    decoded = looks(horizon_lm.from_pretrained(folders("fp8"), "cpu", quantization_config={"dequantize": True}))
    assert not any(decoded[name] for name in (*ATTRIBUTES, "trainable", "config"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_footprint_is_that_of_codes_and_scales(folders: Callable[[str], Path], kind: str) -> None:
    model = opened(folders(kind), kind)
    store = model._horizon.engine.store
    buffers = sum(each.nbytes for each in model.buffers())
    assert model.get_memory_footprint() - buffers == sum(
        store.codecs[name].num_bytes(param.shape) if name in store.codecs else param.nbytes
        for name, param in model.named_parameters()
    )
    assert model.get_memory_footprint() - buffers == model.get_memory_footprint(return_buffers=False)
    if kind == "4bit":  # bitsandbytes' scales and tables are no parameters, so transformers does not count them
        packed = [param for name, param in model.named_parameters() if isinstance(store.codecs.get(name), Bnb4Bit)]
        scales = sum(param.packed_bytes - param.numel() // 2 for param in packed)
        assert model.get_memory_footprint() - scales == plain_in_4_bits(folders("4bit")).get_memory_footprint()


def adapted(model: Any, config: Any) -> Any:
    """Return a model with adapters that change what it computes."""
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config)
    torch.manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.data.add_(torch.randn(param.shape).to(param.dtype) * 0.02)
    return model


def gradients(model: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model.train()(**tiny_models.batch()).loss.backward()
    grads = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    assert grads
    return grads


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=str)
def test_a_script_for_4_bits(folders: Callable[[str], Path], settings: dict[str, Any]) -> None:
    """The usual one: prepare, find the linear layers by their class, add adapters, count parameters. Equal to plain, bit for bit."""
    found = []
    for model in (plain_in_4_bits(folders("4bit")), opened(folders("4bit"), "4bit", quantization_config=in_4_bits())):
        prepared = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
        layers = {n.split(".")[-1] for n, m in prepared.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}
        tuned = adapted(prepared, lora(target_modules=sorted(layers), **settings)())
        for name, module in tuned.named_modules():
            if "norm" in name:
                module.to(torch.float32)
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.to(torch.float32)
        found.append(
            [sorted(layers), tuned.get_nb_trainable_parameters(), model.is_gradient_checkpointing, gradients(tuned)]
        )
    assert difference(*found, 0.0) is None


@pytest.mark.parametrize("precision", ["bf16", "fp32_master"])
def test_a_script_for_4_bits_in_16_bits(folders: Callable[[str], Path], precision: str) -> None:
    """Adapters are rounded to bfloat16 then."""
    plain = plain_in_4_bits(folders("4bit"), dtype=torch.bfloat16)
    ours = horizon_lm.from_pretrained(folders("4bit"), "cpu", precision, quantization_config=in_4_bits())
    found = [gradients(adapted(peft.prepare_model_for_kbit_training(model), lora()())) for model in (plain, ours)]
    assert difference(*found, 2e-2) is None


def test_training_without_adapters_is_rejected(folders: Callable[[str], Path], tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    for kind in ("4bit", "mxfp4"):
        model = opened(folders(kind), kind)
        with pytest.raises(ValueError, match="attach trainable adapters"):
            horizon_lm.trainer(Trainer)(model, args)
        horizon_lm.trainer(Trainer)(adapted(model, lora(target_modules=["q_proj"])()), args)


# PEFT's layers for 4 bits cannot do these, on plain models either, or do them by themselves.
LOST: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "Hira": (method("Hira"), ModelNotSupportedError, "PEFT's HIRA is not supported on weights in the 4 bits"),
    "Shira": (method("Shira", r=2), ModelNotSupportedError, "PEFT's SHIRA is not supported on weights in the 4 bits"),
    "mica": (lora(init_lora_weights="mica"), ModelNotSupportedError, "init_lora_weights='mica' is not supported on"),
    "Glora": (method("Glora"), ValueError, "Linear4bit.* is not a plain torch.nn.Linear"),
    "pissa": (lora(init_lora_weights="pissa"), StreamingError, "quantized, and its values cannot be changed.*pissa"),
    "pissa_niter": (
        lora(init_lora_weights="pissa_niter_4"),
        StreamingError,
        "quantized, and its values cannot be changed.*pissa",
    ),
    "olora": (lora(init_lora_weights="olora"), StreamingError, "quantized, and its values cannot be changed.*olora"),
}
ON_4_BITS = {
    "lora": lora(), "dora": lora(use_dora=True), "rslora": lora(use_rslora=True), "False": lora(init_lora_weights=False),
    **{name: config for name, config in WORK.items() if name not in LOST},
}  # fmt: skip


@pytest.mark.parametrize("kind", thinned(ON_4_BITS, every=8))
def test_methods_on_4_bits(folders: Callable[[str], Path], kind: str) -> None:
    """Equal to PEFT on the decoded weights, bit for bit, where plain 4 bits have other kernels, or no method."""
    config = ON_4_BITS[kind]
    model = opened(folders("4bit"), "4bit")
    plain = dequantized(folders("4bit"), "4bit", model).requires_grad_(False)
    found = [gradients(adapted(each, config())) for each in (plain, model)]
    assert difference(*found, 0.0) is None


@pytest.mark.parametrize("kind", LOST)
def test_methods_that_4_bits_lack_are_rejected(folders: Callable[[str], Path], kind: str) -> None:
    config, error, message = LOST[kind]
    with pytest.raises(error, match=message):
        gradients(adapted(opened(folders("4bit"), "4bit"), config()))


@pytest.mark.parametrize("kind", thinned(["mxfp4", "fp8", "int4"], every=3))
def test_initialisations_on_other_formats(folders: Callable[[str], Path], kind: str) -> None:
    """DoRA and SVDs read decoded weights; PiSSA would write them."""
    targets = ["q_proj", "v_proj"]
    for settings in ({"use_dora": True}, {"init_lora_weights": "mica"}, {"init_lora_weights": "orthogonal"}):
        model = opened(folders(kind), kind)
        plain = dequantized(folders(kind), kind, model).requires_grad_(False)
        found = [gradients(adapted(each, lora(target_modules=targets, **settings)())) for each in (plain, model)]
        assert difference(*found, 1e-5) is None, settings
    if kind != "mxfp4":  # whose attention is not quantized
        with pytest.raises(StreamingError, match="its values cannot be changed"):
            adapted(opened(folders(kind), kind), lora(target_modules=targets, init_lora_weights="pissa")())


def test_codes_are_not_read_or_replaced(folders: Callable[[str], Path]) -> None:
    model = opened(folders("4bit"), "4bit")
    before = gradients(tuned := adapted(model, lora()()))
    uses: list[Callable[[], Any]] = [
        tuned.merge_adapter, lambda: model.dequantize(), lambda: copy.copy(tuned).merge_and_unload(),
        lambda: bitsandbytes.functional.dequantize_4bit(
            model.model.layers[0].mlp.up_proj.weight.data, model.model.layers[0].mlp.up_proj.weight.quant_state
        ),
        lambda: peft.replace_lora_weights_loftq(tuned, str(folders("4bit") / "model.safetensors")),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(HorizonError, match=r"horizon-lm merge|save_pretrained\(folder\)"):
            use()
    tuned.zero_grad()
    assert difference(before, gradients(tuned), 0.0) is None


def test_a_written_model_is_not_quantized(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Its weights are decoded, so its config must not say otherwise."""
    for kind in ("4bit", "fp8"):
        model = opened(folders(kind), kind)
        model.save_pretrained(tmp_path / kind, state_dict=model.state_dict())
        assert "quantization_config" not in json.loads((tmp_path / kind / "config.json").read_text())
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype=torch.float32)
        assert torch.equal(
            plain.model.layers[1].mlp.down_proj.weight, model.model.layers[1].mlp.down_proj.weight.decode()
        )
        assert "quantization_config" in model.config.to_dict()
