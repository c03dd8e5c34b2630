"""A folder is opened as transformers opens it, and written with the dtypes that are promised."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Gemma3Config,
    GemmaConfig,
    GPTJConfig,
    HunYuanMoEV1Config,
    LlamaConfig,
)

import horizon_lm
from horizon_lm.errors import ConfigError
from horizon_lm.model import gguf_weights, hf_config
from horizon_lm.model.files.checkpoint_loader import check_folder
from horizon_lm.model.opening import created_in_float32
from horizon_lm.model.source import ModelSource
from horizon_lm.model.units import find_parts
from tests.census.inputs import text_batch
from tests.census.tiny_models import build
from tests.support.thinned_cases import thinned
from tests.support.tiny_models import attending_as_streamed

SMALL = {"vocab_size": 90, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
DEEPSEEK = DeepseekV3Config(
    **SMALL, hidden_size=24, intermediate_size=32, moe_intermediate_size=16, q_lora_rank=8, kv_lora_rank=8,
    qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=8, n_group=1, topk_group=1,
    num_experts_per_tok=2, first_k_dense_replace=0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
GEMMA = GemmaConfig(**SMALL, hidden_size=40, intermediate_size=64, head_dim=16)  # whose embeddings are scaled by a root
GPTJ = GPTJConfig(
    vocab_size=90, n_embd=24, n_layer=2, n_head=2, n_positions=512, rotary_dim=8, bos_token_id=0, eos_token_id=0
)
APERTUS = ApertusConfig(**SMALL, hidden_size=24, intermediate_size=32, pad_token_id=0)
ERNIE = Ernie4_5_MoeConfig(
    **SMALL, hidden_size=24, intermediate_size=32, moe_intermediate_size=16, moe_num_experts=4, moe_k=2, pad_token_id=0
)
HUNYUAN = HunYuanMoEV1Config(
    **SMALL,
    hidden_size=24,
    intermediate_size=32,
    head_dim=12,
    num_experts=4,
    moe_topk=2,
    pad_token_id=0,
    eod_token_id=0,
)
LLAMA = LlamaConfig(**SMALL, hidden_size=24, intermediate_size=32)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp32_master": torch.bfloat16}
HALVES = [torch.bfloat16, torch.float32]


def save(folder: Path, config: Any, dtype: torch.dtype) -> None:
    """Save a model in this dtype. Biases of routers, as trained ones, differ by less than bfloat16's spacing."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            buffer.data = 8 + 0.02 * torch.rand(buffer.shape) if "e_score" in name else buffer + 0.123
    model.save_pretrained(folder)


def written(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def buffers_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: each
        for name, each in written(folder).items()
        if name.endswith(("e_score_correction_bias", "beta", "eps"))
    }


def halve(master: torch.Tensor) -> torch.Tensor:
    """Return the upper half of an fp32 master: the nearest bfloat16 value, and of two nearest ones that away from zero."""
    return ((master.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)


def open_plain(folder: Path, precision: str) -> Any:
    """Return the model of transformers that a precision computes with, in float32 as on the CPU."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=PRECISIONS[precision])
    kept = {name for name, parameter in plain.named_parameters() if parameter.dtype == torch.float32}
    plain.float()
    if precision == "fp32_master":
        masters = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
        for name, parameter in plain.named_parameters():
            if name not in kept:
                parameter.data = halve(masters[name].data)
    return plain


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("config", [DEEPSEEK, GEMMA, GPTJ, APERTUS], ids=lambda each: each.model_type)
def test_buffers_and_logits_are_those_of_transformers(
    config: Any, precision: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save(tmp_path, config, dtype)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=PRECISIONS[precision])
    model = horizon_lm.from_pretrained(tmp_path, precision=precision, head="whole")
    theirs, ours = dict(plain.named_buffers()), dict(model.named_buffers())
    assert [name for name, each in theirs.items() if not same(ours[name], each)] == []
    ids = torch.arange(3, 83).reshape(2, 40)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, open_plain(tmp_path, precision)(ids).logits)


def test_four_bits_quantize_a_router_that_is_created_in_float32(tmp_path: Path) -> None:
    save(tmp_path, HUNYUAN, torch.bfloat16)
    name = "model.layers.1.mlp.gate.wg.weight"
    assert name in horizon_lm.from_pretrained(tmp_path, allow_unproven_model=True)._horizon.engine.store.in_float32
    model = horizon_lm.from_pretrained(tmp_path, load_in_4bit=True, head="whole", allow_unproven_model=True)
    assert name in model._horizon.engine.store.codecs
    model.save_pretrained(tmp_path / "written")
    assert written(tmp_path / "written")[name].dtype == written(tmp_path)[name].dtype == torch.float32
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "written", dtype=torch.float32)
    ids = torch.arange(3, 83).reshape(2, 40)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)


def test_four_bits_leave_buffers_as_they_are(tmp_path: Path) -> None:
    save(tmp_path, DEEPSEEK, torch.bfloat16)
    model = horizon_lm.from_pretrained(tmp_path, load_in_4bit=True)
    assert same(model.get_buffer(BIAS), written(tmp_path)[BIAS])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_buffers_are_written_as_they_were_read(precision: str, tmp_path: Path) -> None:
    for config, dtype in ((DEEPSEEK, torch.bfloat16), (APERTUS, torch.float32)):
        source, target = tmp_path / f"{config.model_type}", tmp_path / f"{config.model_type}-written"
        save(source, config, dtype)
        horizon_lm.from_pretrained(source, precision=precision).save_pretrained(target)
        before, after = buffers_of(source), buffers_of(target)
        assert before.keys() == after.keys()
        assert [name for name in before if not same(after[name], before[name])] == []


def test_a_changed_buffer_is_written_as_it_is(tmp_path: Path) -> None:
    save(tmp_path, APERTUS, torch.float32)
    model = horizon_lm.from_pretrained(tmp_path)
    name = "model.layers.0.mlp.act_fn.beta"
    model.get_buffer(name).fill_(0.25)
    model.save_pretrained(tmp_path / "written")
    assert written(tmp_path / "written")[name] == 0.25


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_are_written_in_the_promised_dtype(precision: str, tmp_path: Path) -> None:
    pytest.importorskip("xxhash", reason="needs the whole installation")
    from horizon_lm.runs.checkpoints.checkpoint import save_checkpoint
    from horizon_lm.runs.checkpoints.export import export_checkpoint

    save(tmp_path, LLAMA, torch.bfloat16)
    model = horizon_lm.from_pretrained(tmp_path, precision=precision)
    model.save_pretrained(tmp_path / "written")
    expected = "float32" if precision == "float32" else "bfloat16"
    assert {str(each.dtype) for each in written(tmp_path / "written").values()} == {f"torch.{expected}"}
    assert json.loads((tmp_path / "written/config.json").read_text())["dtype"] == expected
    save_checkpoint(tmp_path / "checkpoint", model)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "exported")
    assert {str(each.dtype) for each in written(tmp_path / "exported").values()} == {f"torch.{expected}"}
    assert json.loads((tmp_path / "exported/config.json").read_text())["dtype"] == expected


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("config", "dtype"), [(DEEPSEEK, torch.bfloat16), (APERTUS, torch.float32)])
def test_checkpoints_restore_buffers(config: Any, dtype: torch.dtype, precision: str, tmp_path: Path) -> None:
    """A run that goes on reads the weights from its checkpoint, not from the folder of the model."""
    pytest.importorskip("xxhash", reason="needs the whole installation")
    from horizon_lm.engine.opening.model_opening import OpenRequest, open_model
    from horizon_lm.runs.checkpoints.checkpoint import load_checkpoint, save_checkpoint
    from horizon_lm.runs.checkpoints.export import export_checkpoint

    save(tmp_path, config, dtype)
    model = horizon_lm.from_pretrained(tmp_path, precision=precision)
    save_checkpoint(tmp_path / "checkpoint", model)
    resumed = open_model(OpenRequest(name=tmp_path, options={"precision": precision}, reads_weights=False))
    load_checkpoint(tmp_path / "checkpoint", resumed)
    theirs = dict(model.named_buffers())
    assert [name for name, each in resumed.named_buffers() if not same(each, theirs[name])] == []
    resumed.save_pretrained(tmp_path / "resumed")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "exported")
    before = buffers_of(tmp_path)
    for folder in ("resumed", "exported"):
        after = buffers_of(tmp_path / folder)
        assert before.keys() == after.keys()
        assert [name for name in before if not same(after[name], before[name])] == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_that_transformers_keeps_in_float32_are_written_with_all_bits(precision: str, tmp_path: Path) -> None:
    save(tmp_path, ERNIE, torch.float32)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    before = written(tmp_path)
    assert before["model.layers.1.mlp.gate.weight"].dtype == torch.float32
    model = horizon_lm.from_pretrained(tmp_path, precision=precision)
    for dtype in PRECISIONS.values():  # as a run looks at the folder before it opens it
        skeleton = ModelSource(hf_config.load_config(tmp_path, False), str(tmp_path), tmp_path, dtype=dtype).skeleton()
        assert check_folder(skeleton, tmp_path, None) == []
    for dtype in (None, torch.bfloat16) if precision != "float32" else ():
        model.save_pretrained(tmp_path / "written", dtype=dtype)
        after = written(tmp_path / "written")
        assert [name for name in before if not same(after[name], before[name])] == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_of_a_model_in_memory_keep_all_bits(precision: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ERNIE, dtype=torch.float32)
    gates = {name: each.detach().clone() for name, each in model.named_parameters() if "mlp.gate." in name}
    for name, parameter in model.named_parameters():
        if name not in gates:
            parameter.data = parameter.data.bfloat16()
    model = horizon_lm.stream(model, precision=precision)
    assert [name for name, each in gates.items() if not same(model.get_parameter(name).data, each)] == []


@pytest.mark.parametrize(
    ("model_type", "head", "way"),
    thinned(
        itertools.product(
            ("deepseek_v4", "hy_v4", "hunyuan_v1_moe", "olmo_hybrid"),
            ("whole", "chunked"),
            ("stream", "from_pretrained", "adapters"),
        ),
        every=5,
    ),
)
def test_weights_that_transformers_keeps_in_float32_are_computed_with_in_float32(
    model_type: str, head: str, way: str, tmp_path: Path
) -> None:
    """Forward and backward equal those of transformers in bfloat16, bit for bit, if the weights have no more bits."""
    if model_type == "deepseek_v4" and transformers.__version__ < "5.23":
        pytest.skip("this transformers cannot compute it in bfloat16")
    model, batch = build(model_type), text_batch(model_type)
    model.bfloat16().save_pretrained(tmp_path)
    plain, again = (type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).train() for _ in range(2))
    attending_as_streamed(plain)
    options = {"precision": "fp32_master", "compute_dtype": torch.bfloat16, "head": head, "grad_dtype": torch.float32}
    streamed = (
        horizon_lm.from_pretrained(tmp_path, **options)
        if way == "from_pretrained"
        else horizon_lm.stream(again, **options)
    )
    if way == "adapters":
        peft = pytest.importorskip("peft", reason="needs the whole installation")
        config = peft.LoraConfig(target_modules=["o_b_proj", "o_proj"])
        streamed = peft.get_peft_model(streamed, config).unload()
        streamed.requires_grad_(True)
    expected = plain(**batch, use_cache=False)
    found = streamed.train()(**batch)
    assert head == "chunked" or same(found.logits, expected.logits)
    assert torch.allclose(found.loss, expected.loss, rtol=1e-6, atol=0)
    for each in (expected, found):
        each.loss.backward()
    grads = {name: parameter.grad for name, parameter in streamed.named_parameters()}
    off = [
        name
        for name, parameter in plain.named_parameters()
        if parameter.grad is not None and not torch.equal(grads[name], parameter.grad.float())
    ]
    assert off == []


@pytest.mark.parametrize("model_type", ["hunyuan_v1_moe", "olmo_hybrid", "zamba", "xlnet", "llama"])
def test_weights_that_a_model_creates_in_float32_are_found(model_type: str) -> None:
    """Plain transformers cannot compute xlnet in bfloat16, so it is computed as before."""
    found = created_in_float32(model := build(model_type), dict(model.named_parameters()))
    endings = {"hunyuan_v1_moe": "gate.wg.weight", "olmo_hybrid": "A_log", "zamba": "A_log"}
    ending = endings.get(model_type, "nothing")
    assert found == {name for name, _ in model.named_parameters() if name.endswith(ending)}


def test_weights_that_other_code_has_converted_to_float32_are_computed_with_as_before() -> None:
    model = build("hunyuan_v1_moe").bfloat16()
    gates = {name for name, _ in model.named_parameters() if name.endswith("gate.wg.weight")}
    for name, parameter in model.named_parameters():
        if name in gates or "norm" in name or name == "lm_head.weight":
            parameter.data = parameter.data.float()
    assert find_parts(model).in_float32 == gates


def test_the_config_of_the_caller_is_not_changed(tmp_path: Path) -> None:
    save(tmp_path, LLAMA, torch.bfloat16)
    config = LlamaConfig.from_pretrained(tmp_path)
    model = horizon_lm.from_pretrained(tmp_path, precision="float32", config=config)
    assert (model.config.dtype, config.dtype) == (torch.float32, torch.bfloat16)


GEMMA3 = Gemma3Config(  # whose class draws a parameter with torch.randn
    text_config={
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16,
    },
    vision_config={
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 8,
    },
    mm_tokens_per_image=4, image_token_index=60, boi_token_index=61, eoi_token_index=62,
)  # fmt: skip


@pytest.mark.parametrize("config", [DEEPSEEK, GEMMA3], ids=lambda config: config.model_type)
def test_opening_draws_no_random_numbers(config: Any, tmp_path: Path) -> None:
    """Adapters that are added next begin with the values that they have in plain transformers."""
    save(tmp_path, config, torch.bfloat16)
    torch.manual_seed(0)
    expected = torch.get_rng_state()
    horizon_lm.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gguf_file_is_dequantized_to_the_dtype_that_it_is_opened_with(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dequantized(folder: Path, gguf_file: str, dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_config(GEMMA, dtype=dtype)

    monkeypatch.setattr(gguf_weights, "load_gguf", dequantized)
    model = horizon_lm.from_pretrained(tmp_path, precision=precision, gguf_file="model.gguf")
    assert model.get_buffer("model.embed_tokens.embed_scale").dtype == PRECISIONS[precision]
    assert set(model._horizon.engine.store.source_dtypes.values()) == {PRECISIONS[precision]}


def test_a_config_for_a_gguf_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave config out"):
        horizon_lm.from_pretrained(tmp_path, gguf_file="model.gguf", config=GEMMA)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_one_file_is_read_before_an_index(tied: bool, tmp_path: Path) -> None:
    """Files that an earlier save has left are not read, nor is a head that is in them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA.to_diff_dict() | {"tie_word_embeddings": tied}))
    model.save_pretrained(tmp_path)
    older = {name: value + 1 for name, value in written(tmp_path).items()}
    older["lm_head.weight"] = older["model.embed_tokens.weight"] + 1
    save_file(older, tmp_path / "model-00001-of-00001.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(older, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    found = horizon_lm.from_pretrained(tmp_path, device="cpu", precision="float32").state_dict()
    assert plain.keys() == found.keys()
    assert [name for name in plain if not torch.equal(plain[name], found[name])] == []


def test_experts_are_in_order_whatever_file_they_are_in(tmp_path: Path) -> None:
    """In two files by sorted names, experts 10 and 11 lie before expert 2."""
    config = Ernie4_5_MoeConfig(**ERNIE.to_diff_dict() | {"moe_num_experts": 12})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    weights = dict(sorted(written(tmp_path).items()))
    names = list(weights)
    cut = next(index for index, name in enumerate(names) if ".layers.1.mlp.experts.3." in name)
    files = {
        f"model-0000{number}-of-00002.safetensors": part for number, part in enumerate((names[:cut], names[cut:]), 1)
    }
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, tmp_path / file, {"format": "pt"})
    (tmp_path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    found = horizon_lm.from_pretrained(tmp_path, device="cpu", precision="float32").state_dict()
    assert [name for name in plain if not torch.equal(plain[name], found[name])] == []


def test_the_config_has_the_dtype_of_the_embedding(tmp_path: Path) -> None:
    """A head in float32 does not make other programs open the whole model in float32."""
    save(tmp_path, LLAMA, torch.bfloat16)
    weights = written(tmp_path)
    weights["lm_head.weight"] = weights["lm_head.weight"].float()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    model = horizon_lm.from_pretrained(tmp_path, device="cpu")
    model.save_pretrained(tmp_path / "out")
    pytest.importorskip("xxhash", reason="checkpoints of runs need the whole installation")
    horizon_lm.save_checkpoint(tmp_path / "one", model)
    horizon_lm.export_checkpoint(tmp_path / "one", tmp_path / "exported")
    for folder in ("out", "one", "exported"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == "bfloat16"
    for folder in ("out", "exported"):
        assert written(tmp_path / folder)["lm_head.weight"].dtype == torch.float32


@pytest.mark.parametrize(("small", "large", "expected"), [("F32", "BF16", 2), ("BF16", "F32", 4)])
def test_the_bytes_of_a_folder_are_those_of_most_numbers(small: str, large: str, expected: int, tmp_path: Path) -> None:
    """A norm in float32 does not double the bytes that a plan counts for files."""
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16}
    weights = {name: torch.zeros(size, dtype=kinds[small]) for name, size in (("a", 8), ("z", 8))}
    save_file(weights | {"m": torch.zeros(64, dtype=kinds[large])}, tmp_path / "model.safetensors")
    assert hf_config.stored_bytes(tmp_path, LLAMA) == expected
