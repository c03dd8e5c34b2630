"""A GGUF file is opened as the model that its metadata and tensors describe to llama.cpp, or rejected by the name of what is not known."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import horizon_lm
from horizon_lm.errors import ConfigError
from horizon_lm.model.gguf_weights import load_gguf
from horizon_lm.model.hf_config import load_config
from horizon_lm.model.llama3_scaling import scaling_of
from horizon_lm.tools.gguf.export import FILE, export_gguf
from tests.support.gguf_files import GEMMA, LLAMA3, MIXTURE, PADDED, YARN, change, save, tensors

pytest.importorskip("gguf")

THETA = {"rope_theta": 1e4}
LINEAR = THETA | {"rope_type": "linear", "factor": 4.0}
LONGROPE = THETA | {
    "rope_type": "longrope", "partial_rotary_factor": 0.75, "original_max_position_embeddings": 8,
    "long_factor": [1.0, 1.5, 4.0, 5.0, 6.0, 7.0], "short_factor": [1.0, 1.25, 2.0, 2.0, 2.0, 2.0],
}  # fmt: skip
DEFAULT = THETA | {"rope_type": "default"}
SCALES = {"attention_multiplier": 0.5, "embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.22}
PHI = PADDED | {"hidden_size": 64, "sliding_window": None}
WIDE = {"hidden_size": 64, "num_attention_heads": 2}  # heads of 32, in which scalings are no steps
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", WIDE | {"rope_parameters": LLAMA3}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "llama, yarn": ("llama", WIDE | {"rope_parameters": YARN}),
    "llama, other heads": ("llama", {"head_dim": 16, "num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mixtral, llama3": ("mixtral", WIDE | MIXTURE | {"rope_parameters": LLAMA3}),
    "qwen2, yarn": ("qwen2", WIDE | {"rope_parameters": YARN}),
    "qwen2_moe": ("qwen2_moe", MIXTURE | {"shared_expert_intermediate_size": 40}),
    "qwen3, other heads": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", MIXTURE | {"norm_topk_prob": True, "head_dim": 16}),
    "phi3, half a head": ("phi3", PHI | {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}}),
    "phi3, longrope": ("phi3", PHI | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8}),
    "gemma": ("gemma", {"tie_word_embeddings": True, "head_dim": 16}),
    "gemma2, softcaps": ("gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3, linear, a softcap": (
        "gemma3_text",
        GEMMA
        | {
            "final_logit_softcapping": 3.0,
            "num_hidden_layers": 7,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": DEFAULT},
        },
    ),
    "granite, llama3": ("granite", WIDE | SCALES | {"rope_parameters": LLAMA3}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", PADDED | {"num_hidden_layers": 5}),
}  # fmt: skip
IDS = torch.arange(40).view(2, 20) % 90


def written(folder: Path, model_type: str = "llama", **settings: Any) -> Path:
    """Write a model to folder/model, and as a GGUF file to the folder that is returned."""
    export_gguf(save(folder / "model", model_type, **settings), folder / "out")
    return folder / "out"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def opened(folder: Path) -> Any:
    return load_gguf(folder, FILE, torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_read(tmp_path: Path, case: str) -> None:
    """Settings that transformers' own reader does not read decide what a model computes."""
    model_type, settings = CASES[case]
    folder = written(tmp_path, model_type, **settings)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    found = opened(folder)
    assert torch.allclose(logits(found), logits(plain), rtol=1e-4, atol=1e-4 * logits(plain).abs().max().item())


def test_the_scaling_of_llama_3_is_exported(tmp_path: Path) -> None:
    """What a run writes after it was begun from a file has the scaling that the file has as a tensor."""
    folder = written(tmp_path, **WIDE, rope_parameters=LLAMA3)
    model = horizon_lm.from_pretrained(folder, device="cpu", precision="float32", gguf_file=FILE)
    model.save_pretrained(tmp_path / "saved")
    found = json.loads((tmp_path / "saved" / "config.json").read_text())["rope_parameters"]
    assert found == LLAMA3


FACTORS = "rope_freqs.weight"


@pytest.mark.parametrize(
    "scaling",
    [
        (8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 1.0, 2.5, 1000), (16.0, 0.5, 6.0, 300), (2.0, 1.0, 32.0, 100),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("theta", "dim"), [(5e5, 128), (1e4, 64), (1e4, 8)])
def test_scaling_from_factors(scaling: tuple[float, float, float, int], theta: float, dim: int) -> None:
    """Settings are found that have the factors, whatever those were that the factors were made of."""
    frequencies = [theta ** (-index / dim) for index in range(0, dim, 2)]

    def factors(factor: float, low: float, high: float, original: int) -> torch.Tensor:
        shares = [(original * each / (2 * math.pi) - low) / (high - low) for each in frequencies]
        ramp = [min(max(share, 0.0), 1.0) for share in shares]
        return torch.tensor([1 / ((1 - share) / factor + share) for share in ramp])

    expected = factors(*scaling)
    found = scaling_of(expected.tolist(), frequencies)
    assert found is not None
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if found["rope_type"] == "llama3":
        assert torch.allclose(factors(*(found[name] for name in names)), expected, rtol=2e-6, atol=0.0)
    else:  # no frequency, or each of them, is scaled
        assert torch.allclose(torch.tensor(found.get("factor", 1.0)), expected)
    if scaling[:3] == (8.0, 1.0, 4.0) and dim == 128:
        assert [found[name] for name in names] == list(scaling)


def test_factors_of_no_scaling(tmp_path: Path) -> None:
    folder = written(tmp_path, **WIDE, rope_parameters=LLAMA3)
    factors = tensors(folder / FILE)[FACTORS]
    for others in (
        factors.flip(0),
        factors * torch.linspace(1, 1.01, len(factors)),
        factors[:-1],
        -factors,
        factors * torch.nan,
    ):
        change(folder / FILE, weights={FACTORS: others})
        with pytest.raises(ConfigError, match=rf"{FILE}: tensor {FACTORS}: .* is not supported"):
            load_config(folder, False, FILE)


def test_one_factor_for_all_frequencies(tmp_path: Path) -> None:
    folder = written(tmp_path, **WIDE)
    change(folder / FILE, weights={FACTORS: torch.full((16,), 2.0)})
    assert load_config(folder, False, FILE).rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    change(folder / FILE, weights={FACTORS: torch.ones(16)})
    assert load_config(folder, False, FILE).rope_parameters == {"rope_type": "default", "rope_theta": 1e4}


# Metadata


YARN_KEYS = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
ORIGINAL = "original_max_position_embeddings"
APPLIED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"llama.rope.freq_base": None}, {}),
    ("llama", {"llama.rope.freq_base": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    ("llama", {"llama.rope.scale_linear": 4.0}, {"rope_parameters": LINEAR}),
    ("llama", {"llama.rope.scaling.factor": 4.0}, {"rope_parameters": LINEAR}),  # llama.cpp's default
    ("llama", {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {}),
    ("llama", YARN_KEYS, {"rope_parameters": THETA | {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 256}}),
    (
        "llama",
        YARN_KEYS | {"llama.rope.scaling.attn_factor": 2.0},
        {"rope_parameters": THETA | {
            "rope_type": "yarn", "factor": 4.0, ORIGINAL: 256, "attention_factor": 2 * (0.1 * math.log(4) + 1),
        }},
    ),
    ("llama", {"llama.attention.head_count_kv": None}, {"num_key_value_heads": 4}),
    ("llama", {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [48, 48]}, {}),
    ("llama", {"llama.vocab_size": None}, {}),
    ("llama", {"llama.vocab_size": 7}, {}),  # llama.cpp takes the number of tokens
    ("llama", {"llama.attention.layer_norm_rms_epsilon": 0.0}, {"rms_norm_eps": 0.0}),
    ("llama", {"llama.attention.layer_norm_rms_epsilon": 1e-3}, {"rms_norm_eps": 1e-3}),
    ("llama", {"llama.rope.scaling.finetuned": False, "llama.expert_count": 0, "general.author": "x", "x.y": 1}, {}),
    ("gemma2", {"gemma2.attention.sliding_window": None}, {"sliding_window": 4096}),
    ("gemma2", {"gemma2.attn_logit_softcapping": None, "gemma2.final_logit_softcapping": 7.0}, {
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 7.0,
    }),
    ("gemma2", {"gemma2.block_count": 46}, {"query_pre_attn_scalar": 8}),
    ("gemma3_text", {"gemma3.block_count": 62}, {"query_pre_attn_scalar": 8}),
    ("gemma3_text", {"gemma3.attention.sliding_window_pattern": 2}, {"layer_types": ["sliding_attention", "full_attention"]}),
    ("gemma3_text", {"gemma3.attention.sliding_window_pattern": [False, True]}, {
        "layer_types": ["full_attention", "sliding_attention"],
    }),
    ("gemma3_text", {"gemma3.attention.sliding_window": None}, {"layer_types": ["full_attention"] * 2}),
    ("gemma3_text", {"gemma3.final_logit_softcapping": 0.0}, {}),  # none
    ("gemma3_text", {"gemma3.rope.freq_base_swa": 2e4}, {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }}),
    ("phi3", {"phi3.attention.sliding_window": 9, "phi3.rope.dimension_count": 4}, {
        "sliding_window": 9, "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.25},
    }),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return files of a few types of models."""
    types = {
        "gemma2": GEMMA,
        "gemma3_text": GEMMA,
        "granite": SCALES,
        "llama": {},
        "phi3": PHI,
        "qwen2": {},
        "qwen2_moe": MIXTURE,
    }
    folders = {kind: written(tmp_path_factory.mktemp(kind), kind, **settings) for kind, settings in types.items()}
    return {kind: (folder / FILE).read_bytes() for kind, folder in folders.items()}


@pytest.mark.parametrize(("model_type", "keys", "expected"), APPLIED, ids=str)
def test_metadata_that_are_applied(
    files: dict[str, bytes], tmp_path: Path, model_type: str, keys: dict[str, Any], expected: dict[str, Any]
) -> None:
    """They, or llama.cpp's values if a file lacks them, are in the config; others change nothing."""
    (tmp_path / FILE).write_bytes(files[model_type])
    before = load_config(tmp_path, False, FILE).to_dict()
    change(tmp_path / FILE, keys)
    after = load_config(tmp_path, False, FILE).to_dict()
    assert after != before if expected else after == before
    assert {name: after[name] for name in expected} == expected


REJECTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"general.architecture": "rwkv6"}, "general.architecture: rwkv6 is not supported; files of bloom, .*qwen2, .* are opened"),
    ("llama", {"general.type": "adapter"}, "general.type: 'adapter' is not supported"),
    ("llama", {"adapter.lora.alpha": 2.0}, "adapter.lora.alpha"),
    ("llama", {"split.count": 3, "split.no": 1}, "is part 2 of 3 of a model; join all parts first"),
    ("llama", {"llama.context_length": None}, "llama.context_length is missing"),
    ("llama", {"llama.attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
    ("llama", {"llama.rope.dimension_count": 4}, "llama.rope.dimension_count: 4"),
    ("llama", {"llama.rope.scaling.type": "longer"}, "llama.rope.scaling.type: 'longer'"),
    ("llama", {"llama.rope.scaling.attn_factor": 2.0}, "llama.rope.scaling.attn_factor: 2.0"),
    ("llama", YARN_KEYS | {"llama.rope.scaling.yarn_beta_fast": 16.0}, "llama.rope.scaling.yarn_beta_fast: 16.0"),
    ("llama", YARN_KEYS | {"llama.rope.scaling.yarn_log_multiplier": 0.5}, "llama.rope.scaling.yarn_log_multiplier: 0.5"),
    ("llama", {"llama.attention.value_length": 4}, "llama.attention.value_length: 4"),
    ("llama", {"llama.attention.head_count_kv": [2, 1]}, r"llama.attention.head_count_kv: \[2, 1\]"),
    ("llama", {"llama.attention.causal": False}, "llama.attention.causal: False"),
    ("llama", {"llama.attention.scale": 0.5}, "llama.attention.scale: 0.5"),
    ("llama", {"llama.logit_scale": 0.5}, "llama.logit_scale: 0.5"),
    ("llama", {"llama.unheard_of": 1}, "llama.unheard_of: 1 is not supported for this file; open the model's Hugging Face folder"),
    ("gemma2", {"gemma2.rope.freq_base_swa": 2e4}, "gemma2.rope.freq_base_swa: 20000.0"),
    ("gemma2", {"gemma2.attention.sliding_window": 0}, "gemma2.attention.sliding_window: 0"),  # of no tokens
    ("gemma2", {"gemma2.attn_logit_softcapping": 0.0}, "gemma2.attn_logit_softcapping: 0.0"),
    ("gemma2", {"gemma2.final_logit_softcapping": 0.0}, "gemma2.final_logit_softcapping: 0.0"),
    ("gemma3_text", {"gemma3.attention.sliding_window_pattern": [True]}, "sliding_window_pattern"),
    ("granite", {"granite.attention.scale": 0.0}, "granite.attention.scale: 0.0"),  # not 0 in llama.cpp
    ("granite", {"granite.embedding_scale": 0.0}, "granite.embedding_scale: 0.0"),
    ("granite", {"granite.residual_scale": -0.5}, "granite.residual_scale: -0.5"),
    ("granite", {"granite.rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned: False"),
    ("phi3", {"phi3.rope.scaling.type": "yarn"}, "phi3.rope.scaling.type: 'yarn'"),  # transformers has one scaling of Phi-3
    ("phi3", {"phi3.rope.scaling.factor": 2.0}, "phi3.rope.scaling.factor: 2.0"),
    ("phi3", {"phi3.rope.scale_linear": 2.0}, "phi3.rope.scale_linear: 2.0"),
    ("qwen2", {"qwen2.attention.sliding_window": 9}, "qwen2.attention.sliding_window: 9"),
    ("qwen2_moe", {"qwen2moe.expert_feed_forward_length": None}, "qwen2moe.expert_feed_forward_length is missing"),
    ("qwen2_moe", {"qwen2moe.expert_gating_func": 2}, "qwen2moe.expert_gating_func: 2"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "keys", "message"), REJECTED, ids=str)
def test_metadata_that_are_not_known(
    files: dict[str, bytes], tmp_path: Path, model_type: str, keys: dict[str, Any], message: str
) -> None:
    (tmp_path / FILE).write_bytes(files[model_type])
    change(tmp_path / FILE, keys)
    for read in (lambda: load_config(tmp_path, False, FILE), lambda: opened(tmp_path)):
        with pytest.raises(ConfigError, match=f"gguf_file: .*{message}") as error:
            read()
        assert "download it again" not in str(error.value)  # for it is as it was made


@pytest.mark.parametrize("value", ["many", [1, 2], [1, 2, 3, 4], -1.5, 0], ids=str)
def test_values_of_other_types(files: dict[str, bytes], tmp_path: Path, value: Any) -> None:
    """They are errors of the file, or of the model that it would be, whichever type they have."""
    names = (
        "block_count",
        "embedding_length",
        "attention.head_count",
        "attention.key_length",
        "rope.freq_base",
        "rope.scaling.factor",
    )
    names += ("rope.scaling.type", "rope.dimension_count", "attention.layer_norm_rms_epsilon", "vocab_size")
    for name in ("general.type", "split.count", *(f"llama.{each}" for each in names)):
        (tmp_path / FILE).write_bytes(files["llama"])
        change(tmp_path / FILE, {name: value})
        try:
            opened(tmp_path)
        except ConfigError as error:
            assert FILE in str(error)  # noqa: PT017


# Tensors


def test_biases(tmp_path: Path) -> None:
    """Those of a Llama, which its metadata do not name, are read where transformers' reader leaves them out."""
    folder = written(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path / "model", attention_bias=True, mlp_bias=True)
    expected = AutoModelForCausalLM.from_config(config)
    expected.load_state_dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict(), strict=False)
    weights = {}
    for layer, block in enumerate(expected.model.layers):
        attention, mlp = block.self_attn, block.mlp
        for name, linear, heads in (
            ("attn_q", attention.q_proj, 4), ("attn_k", attention.k_proj, 2), ("attn_v", attention.v_proj, None),
            ("attn_output", attention.o_proj, None), ("ffn_gate", mlp.gate_proj, None), ("ffn_up", mlp.up_proj, None),
            ("ffn_down", mlp.down_proj, None),
        ):  # fmt: skip
            bias = linear.bias.data.normal_()
            if heads is not None:
                bias = bias.view(heads, 2, -1).swapaxes(1, 2).reshape(-1)
            weights[f"blk.{layer}.{name}.bias"] = bias
    change(folder / FILE, weights=weights)
    assert torch.equal(logits(opened(folder)), logits(expected))
    change(folder / FILE, weights={"blk.1.attn_output.bias": None})
    with pytest.raises(ConfigError, match=r"has no tensor blk\.1\.attn_output\.bias"):
        opened(folder)


@pytest.mark.parametrize("window", [None, 0])
def test_gemma_3_without_windows(tmp_path: Path, window: int | None) -> None:
    """All layers have full attention then, as in Rnj-1."""
    rotary = {"full_attention": LINEAR, "sliding_attention": LINEAR}
    layers = {"layer_types": ["full_attention"] * 2, "rope_parameters": rotary}
    folder = written(tmp_path, "gemma3_text", **GEMMA | {"rope_parameters": rotary | {"sliding_attention": DEFAULT}})
    change(folder / FILE, {"gemma3.attention.sliding_window": window})
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, **layers)
    assert torch.allclose(logits(opened(folder)), logits(plain), rtol=1e-4, atol=1e-4)


def test_numbers_of_heads_that_tensors_do_not_have(tmp_path: Path) -> None:
    folder = written(tmp_path)
    for number in (3, 2.0):
        change(folder / FILE, {"llama.attention.head_count_kv": number})
        with pytest.raises(ConfigError, match=FILE):
            opened(folder)


def test_tensors_that_have_no_place(tmp_path: Path) -> None:
    folder = written(tmp_path, "qwen2")
    content = (folder / FILE).read_bytes()
    for weights, message in (
        ({"blk.1.attn_output.bias": torch.ones(32)}, "tensor blk.1.attn_output.bias is not supported for files of qwen2"),
        ({"blk.1.ffn_up.weight": None}, "has no tensor blk.1.ffn_up.weight; make the file again"),
        ({"blk.2.ffn_up.weight": torch.ones(48, 32)}, "tensor blk.2.ffn_up.weight is not supported"),
        ({"blk.1.ffn_up.weight": torch.ones(40, 32)}, r"blk.1.ffn_up.weight is of shape \(40, 32\), but .* make it \(48, 32\)"),
        ({FACTORS: torch.ones(4)}, f"tensor {FACTORS}: .* is not supported"),
        ({"output_norm.weight": torch.full((32,), torch.nan)}, "model.norm.weight has 32 NaN"),
        ({"output_norm.weight": torch.ones(32, dtype=torch.int32)}, "tensor output_norm.weight: its type: 26"),
    ):  # fmt: skip
        (folder / FILE).write_bytes(content)
        change(folder / FILE, weights=weights)
        with pytest.raises(ConfigError, match=message):
            opened(folder)
