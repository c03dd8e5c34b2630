"""Merge adapters of every kind into bases of every kind, and compare with PEFT's own merge, saved and reloaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

import horizon_lm
from tests.census.tiny_models import build
from tests.support import int4_folders, tiny_models
from tests.support.peft_methods import TOKENS, WORK, lora, method
from tests.support.quantized_folders import by_bitsandbytes, save_published

Values = dict[str, torch.Tensor]
Kind = Callable[[], Any]

MODULES = ["q_proj", "v_proj", "down_proj"]
# Two of them need biases, two are no weights, one changes some tokens only, and one does not write what it began with.
NOT_MERGED = ("lora_bias", "Beft", "PromptTuning", "PromptEncoder", "alora", "pissa_niter")
# With a tied base, PEFT's own merge of these changes embedding and head, though the adapters change one of them.
ONE_OF_BOTH = ("target_modules=lm_head", "target_modules=embed_tokens", "dora of the embedding")
LORA: dict[str, Kind] = {
    "lora": lora(),
    "rslora": lora(use_rslora=True),
    "dora": lora(use_dora=True),
    "pissa": lora(init_lora_weights="pissa"),
    "mica": lora(init_lora_weights="mica"),
    "patterns": lora(rank_pattern={r"layers\.0\..*": 2}, alpha_pattern={"v_proj": 32}),
    "dora of the embedding": lora(target_modules=[*MODULES, "embed_tokens"], use_dora=True),
    "bias=lora_only": lora(bias="lora_only"),
    "olora and a head": lora(init_lora_weights="olora", modules_to_save=["lm_head"], bias="all"),
    "ensure_weight_tying": lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "tokens and a norm": lora(trainable_token_indices=TOKENS, modules_to_save=["norm"]),
    "a block's layer": lora(target_modules=["q_proj"], modules_to_save=["layers.1.mlp"]),
}
OTHERS: dict[str, Kind] = {
    "OSF": method("OSF", effective_rank=4),
    "TinyLora": method("TinyLora"),
    "UniLora": method("UniLora"),
    "VBLoRA": method("VBLoRA", r=2, vector_length=8, num_vectors=20),
    "VeRA without its projections": method("Vera", target_modules=["q_proj", "o_proj"], r=8, save_projection=False),
}
KINDS = LORA | {kind: config for kind, config in WORK.items() if kind not in NOT_MERGED} | OTHERS

# Merging these needs biases in the base.
OF_BIASES = {
    "lora_bias": lora(target_modules=["q_proj", "v_proj"], lora_bias=True),
    "Beft": method("Beft", target_modules=["q_proj", "v_proj"]),
}
# By name: the family of a base, its format or dtype, and its settings.
BASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "float32": ("llama", "float32", {}),
    "bf16": ("llama", "bfloat16", {}),
    "tied": ("llama", "float32", {"tie_word_embeddings": True}),
    "tied bf16": ("llama", "bfloat16", {"tie_word_embeddings": True}),
    "fp16": ("llama", "float16", {}),
    "biases": ("qwen2", "float32", {}),
    "tied biases": ("qwen2", "bfloat16", {"tie_word_embeddings": True}),
    "experts": ("qwen3_moe", "bfloat16", {}),
    "buffers": ("deepseek_v3", "float32", {}),
    "buffers bf16": ("deepseek_v3", "bfloat16", {}),
    "nf4": ("llama", "nf4", {}),
    "nested nf4": ("qwen2", "nested", {}),
    "mxfp4": ("gpt_oss", "mxfp4", {}),
    "fp8": ("llama", "fp8", {}),
    "fp8 experts": ("deepseek_v3", "fp8", {}),
    "int4": ("llama", "int4", {}),
    "int4 experts": ("deepseek_v3", "int4 experts", {}),
}
QUANTIZED = ("nf4", "nested", "mxfp4", "fp8", "int4", "int4 experts")


def fitting(kind: Kind, family: str) -> Any:
    """Return PEFT's config of a kind, with modules that a family has."""
    config = kind()
    names = {"deepseek_v3": {"q_proj": "q_a_proj", "v_proj": "kv_b_proj", "k_proj": "kv_b_proj", "down_proj": "o_proj"}}
    names["gpt_oss"] = {"down_proj": "o_proj"}
    names["qwen3_moe"] = {"down_proj": "o_proj"}
    change = names.get(family, {})
    for field in ("target_modules", "feedforward_modules"):
        if isinstance(getattr(config, field, None), set | list):
            setattr(config, field, {change.get(name, name) for name in getattr(config, field)})
    return config


def save_base(folder: Path, name: str) -> tuple[Path, Callable[[], Any]]:
    """Write a base, and return its folder and a function that opens the plain model of it."""
    family, form, settings = BASES[name]
    if form in QUANTIZED:
        published = save_published(family, form, folder / "base", **settings)
        return published, lambda: decoded(published, form)
    save_plain(tiny_models.build(family, **settings), folder / "base", getattr(torch, form))
    return folder / "base", lambda: opened(folder / "base")


def save_plain(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write a model. Its persistent buffers have values that no new model has, in float32."""
    persistent = model.state_dict().keys() & dict(model.named_buffers()).keys()
    buffers = {name: model.get_buffer(name) for name in persistent if model.get_buffer(name).is_floating_point()}
    model.to(dtype)
    for name, buffer in buffers.items():
        path, _, attribute = name.rpartition(".")
        steps = 1 + 0.01 * torch.arange(1, buffer.numel() + 1).view(buffer.shape)
        model.get_submodule(path)._buffers[attribute] = (buffer.float() + 0.5) * steps
    model.save_pretrained(folder)


def opened(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def decoded(folder: Path, form: str) -> Any:
    """Return the plain model of a quantized folder in bf16, as the library of its format decodes it."""
    config, state = AutoConfig.from_pretrained(folder), stored(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    if form in ("int4", "int4 experts"):
        return int4_folders.plain_model(folder, torch.bfloat16).eval()
    if form in ("mxfp4", "fp8"):
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict())
        return model
    for name, param in model.named_parameters():
        is_packed = f"{name}.absmax" in state
        param.data.copy_(by_bitsandbytes(state, name, param.shape) if is_packed else state[name])
    return model


def save_adapter(plain: Any, base: Path, folder: Path, config: Any, scale: float = 0.05) -> None:
    """Write adapters as PEFT does, with values that were trained, or, with a scale of 0, as they begin."""
    torch.manual_seed(1)
    model = peft.get_peft_model(plain, config)
    torch.manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.data.add_((torch.randn(param.shape) * scale).to(param.dtype))
    model.save_pretrained(folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(base)}))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    batch = tiny_models.batch()
    found: torch.Tensor = model.eval()(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).logits.float()
    return found


def stored(folder: Path) -> Values:
    found: Values = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (one, other)))


def in_dtype_of(base: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """Return a float32 value as it is read from a folder that has it in the dtype of the base, if that is one of 16 bits."""
    in_16_bits = base is not None and base.dtype in (torch.bfloat16, torch.float16)
    return value.to(base.dtype).float() if in_16_bits and value.dtype == torch.float32 else value


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def compare(folder: Path, base_name: str, kind: str) -> list[str]:
    """Merge adapters into a base, and return what differs from the adapters, from PEFT's merge and from the base."""
    family, form, settings = BASES[base_name]
    base, plain = save_base(folder, base_name)
    save_adapter(plain(), base, folder / "adapter", fitting((KINDS | OF_BIASES)[kind], family))
    adapted = peft.PeftModel.from_pretrained(plain(), folder / "adapter")
    own = logits(adapted)
    adapted.merge_and_unload().save_pretrained(folder / "peft")
    horizon_lm.merge_adapter(folder / "adapter", folder / "merged")
    merged, expected, before = opened(folder / "merged"), opened(folder / "peft"), logits(plain())
    found = []
    rounding = {"float32": 1e-5, "float16": 1e-2}.get(form, 8e-2)
    one_of_both = kind in ONE_OF_BOTH and settings.get("tie_word_embeddings")
    if one_of_both:
        assert distance(logits(expected), own) > rounding, "PEFT's merge is right now; compare with it"
    elif form != "float32":  # values in 16 bits may choose another expert, and those of RandLora are large
        rounding = max(rounding, 1.01 * distance(logits(expected), own))
    if not distance(logits(merged), own) < rounding:
        found.append(f"logits differ from those of the adapters by {distance(logits(merged), own):.1e}")
    if not distance(own, before) > 2e-3:
        found.append("the adapters change nothing")
    values, base_values = merged.state_dict(), stored(base)
    changed = [
        name
        for name, value in expected.state_dict().items()
        if not same(in_dtype_of(base_values.get(name), value), values[name])
    ]
    if one_of_both:
        changed = [name for name in changed if name not in ("lm_head.weight", "model.embed_tokens.weight")]
    if changed:
        found.append(f"{len(changed)} tensors differ from those of PEFT's merge, for example {changed[0]}")
    written, plain_values = stored(folder / "merged"), plain().state_dict()
    touched = {name for name, value in expected.state_dict().items() if not same(value, plain_values[name])}
    stacks = tuple(name.partition(".experts.")[0] + ".experts." for name in touched if ".experts." in name)
    for name, value in base_values.items():
        if (
            name in written
            and name not in touched
            and not name.startswith(stacks or ("\0",))
            and written[name].dtype == value.dtype
        ):
            if not same(written[name], value):
                found.append(f"{name} has other bytes than in the base")
        elif name not in written and form not in QUANTIZED:
            found.append(f"{name} is missing")
    return found


def compare_type(folder: Path, model_type: str) -> list[str]:
    """Merge LoRA into a base of any model type, and return what differs from PEFT's merge and from the base."""
    save_plain(build(model_type).eval(), folder / "base", torch.float32)
    config = lora(target_modules="all-linear", exclude_modules=["out_proj"])()  # PEFT rejects it in state space models
    save_adapter(opened(folder / "base"), folder / "base", folder / "adapter", config)
    adapted = peft.PeftModel.from_pretrained(opened(folder / "base"), folder / "adapter")
    adapted.merge_and_unload().save_pretrained(folder / "peft")
    horizon_lm.merge_adapter(folder / "adapter", folder / "merged")
    before, written, expected = stored(folder / "base"), stored(folder / "merged"), stored(folder / "peft")
    found = [f"{name} is not in both" for name in before.keys() ^ written.keys()]
    buffers = dict(opened(folder / "base").named_buffers())
    for name in before.keys() & written.keys():
        source = before[name] if name in buffers or same(expected[name], before[name]) else expected[name]
        if not same(written[name], source):
            found.append(f"{name} differs")
    if all(same(written[name], before[name]) for name in before.keys() & written.keys()):
        found.append("the adapters change nothing")
    return found
