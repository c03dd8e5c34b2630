"""A stand-in for the hub, as a cache folder that huggingface_hub reads offline: tiny models, tokenizers and data sets.

TRL's own scripts make TRL's models and data sets. What they would take from the hub is replaced: tokenizers by one small byte-level BPE
with TRL's chat templates, configurations by those of transformers. PEFT's models are made from configurations of the same shapes.
"""

import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from tests.peers.hub_images import config_of, kind_of, processor_of

ROOT = Path(__file__).parents[2]
_COMMIT = "0" * 39 + "1"
_SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "<pad>", "<bos>", "<eos>", "<think>", "</think>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|start|>", "<|message|>", "<|end|>", "<|return|>",
    "<|channel|>", "<|call|>", "<|constrain|>", "<|startoftext|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|end_of_text|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]",
]  # fmt: skip
_KINDS = {  # a part of a model's name: TRL's template, the end token, the padding token
    "Qwen3.5": ("qwen3_5_nothink", "<|im_end|>", "<|endoftext|>"),
    "Qwen3-4B-Instruct-2507": ("qwen3_instruct_2507", "<|im_end|>", "<|endoftext|>"),
    "Qwen3": ("qwen3", "<|im_end|>", "<|endoftext|>"),
    "Qwen2.5-Coder": ("qwen2_5", "<|endoftext|>", "<|endoftext|>"),
    "Qwen2": ("qwen2_5", "<|im_end|>", "<|endoftext|>"),
    "gpt-oss": ("gptoss", "<|return|>", "<|endoftext|>"),
    "Llama-3-8B": ("llama3", "<|eot_id|>", None),
    "Llama-3.1": ("llama3_1", "<|eot_id|>", None),
    "Llama-3.2": ("llama3_2", "<|eot_id|>", None),
    "gemma": ("gemma", "<eos>", "<pad>"),
    "Phi-3.5": ("phi3_5", "<|endoftext|>", "<|endoftext|>"),
    "Phi-3": ("phi3", "<|endoftext|>", "<|endoftext|>"),
    "GLM": ("glm4moe", "<|endoftext|>", "<|endoftext|>"),
    "aya-earth": ("cohere2", "<|im_end|>", "<pad>"),
    "aya": ("cohere", "<|im_end|>", "<pad>"),
    "LFM2.5": ("lfm2_2_5", "<|im_end|>", "<pad>"),
    "LFM2": ("lfm2", "<|im_end|>", "<pad>"),
    "DeepSeek": ("deepseekv3", "<eos>", "<pad>"),
    "Nemotron": ("nemotron_3_nano", "<|im_end|>", "<pad>"),
    "Mistral": ("", "</s>", None),
    "mistral": ("", "</s>", None),
    "Olmo": ("", "<|endoftext|>", "<pad>"),
    "pythia": (None, "<|endoftext|>", None),
    "OPT": (None, "</s>", "<pad>"),
    "opt": (None, "</s>", "<pad>"),
    "GPT": (None, "<|endoftext|>", None),
    "gpt2": (None, "<|endoftext|>", None),
    "llama": (None, "</s>", None),
}  # a template of "": _CHATML
_CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% endif %}"
)


class Hub:
    """The folder of the hub, and the BPE of all its tokenizers."""

    def __init__(self, folder: Path, texts: Iterator[str]):
        self.folder = folder
        self.bpe = Tokenizer(models.BPE())
        self.bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        self.bpe.train_from_iterator(
            texts,
            trainers.BpeTrainer(
                vocab_size=900, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
            ),
        )

    def tokenizer(self, name: str) -> PreTrainedTokenizerFast:
        """Return the tokenizer of a model's name, with TRL's chat template of its kind."""
        found = (kind for part, kind in _KINDS.items() if part in name)
        template, eos, pad = next(found, (None, "<|endoftext|>", "<pad>"))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=self.bpe, eos_token=eos, pad_token=pad, unk_token=None, model_max_length=2048
        )
        if "Llama" in name:
            tokenizer.bos_token = "<|begin_of_text|>"
        if template:
            import trl

            templates = Path(trl.__file__).parent / "chat_templates"
            tokenizer.chat_template = (templates / f"{template}.jinja").read_text(encoding="utf-8")
        elif template is not None:
            tokenizer.chat_template = _CHATML
        return tokenizer

    def save(self, repository: str, *parts: Any) -> None:
        """Save a model, a tokenizer and the like as the only snapshot of a repository."""
        folder = self.folder / f"models--{repository.replace('/', '--')}"
        shutil.rmtree(folder, ignore_errors=True)
        snapshot = folder / "snapshots" / _COMMIT
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(_COMMIT)
        for part in parts:
            if part is not None:
                part.save_pretrained(snapshot)


def make(folder: Path, trl_source: Path | None, images: bool) -> None:
    """Make the hub's folder: PEFT's models and, if there is a source of TRL, TRL's data sets and models, with or without those with images."""
    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    if trl_source is None:
        hub = Hub(folder, (page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md"))))
    else:
        sys.path.insert(0, str(trl_source))
        hub = Hub(folder, _texts(_datasets_of_trl(folder / "datasets_on_disk", "zen", "harmony", "toolcall")))
        np.random.seed(0)  # the scripts draw the pixels
        _datasets_of_trl(folder / "datasets_on_disk", "zen_image", "zen_multi_image")
        _models_of_trl(hub, trl_source, images)
        hub.save("Qwen/Qwen3-4B", hub.tokenizer("Qwen3"))
    _models_of_peft(hub)
    quotes = datasets.Dataset.from_dict({"quote": [f"Of {i} answers, {i // 2} are right." for i in range(24)]})
    datasets.DatasetDict(train=quotes).save_to_disk(
        str(folder / "datasets_on_disk" / "ybelkada--english_quotes_copy" / "default")
    )


def _datasets_of_trl(folder: Path, *names: str) -> dict[tuple[str, str], Any]:
    made: dict[tuple[str, str], Any] = {}

    def push(self: Any, repository: str, config_name: str = "default", **_: Any) -> None:
        made[repository, config_name] = self

    original, datasets.DatasetDict.push_to_hub = datasets.DatasetDict.push_to_hub, push
    try:
        for name in names:
            script = importlib.import_module(f"scripts.generate_{name}_dataset")
            script.main(0.1, True, f"trl-internal-testing/{name.replace('_', '-')}")
    finally:
        datasets.DatasetDict.push_to_hub = original
    for (repository, config), data in made.items():
        data.save_to_disk(str(folder / repository.replace("/", "--") / config))
    return made


def _texts(made: dict[tuple[str, str], Any]) -> Iterator[str]:
    for data in made.values():
        for split in data.values():
            for row in split:
                yield json.dumps(row, ensure_ascii=False)


def _models_of_trl(hub: Hub, source: Path, images: bool) -> None:
    """Run TRL's scripts that make models, after replacing for good what they would load from the hub or push to it."""
    common = importlib.import_module("scripts.generate_tiny_models._common")
    for name in ("check_transformers_version", "check_dtype_pattern", "print_config_diff"):
        setattr(common, name, lambda *_, **__: None)

    def push(
        model: Any, tokenizer: Any, generation: Any, prefix: str = "", suffix: str = "", create_pr: Any = None
    ) -> None:
        if (
            getattr(model.config, "vocab_size", 0) > 2000
        ):  # the script left the vocabulary to the configuration's default
            model.config.vocab_size = len(tokenizer)
            for key in ("pad_token_id", "eos_token_id", "bos_token_id"):
                setattr(model.config, key, getattr(tokenizer, key))
            model = type(model)(model.config).to(torch.bfloat16)
            common.init_weights_tiny_model(model)
        name = "-".join(part for part in (prefix, type(model).__name__, suffix) if part)
        hub.save(f"trl-internal-testing/{name}", model, tokenizer, generation)

    def generation(name: str, **_: Any) -> GenerationConfig:
        tokenizer = hub.tokenizer(name)
        return GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)

    def processor(name: str, **_: Any) -> Any:
        return processor_of(kind_of(name), hub.tokenizer(name))

    def config(name: str, **options: Any) -> Any:
        if kind := kind_of(name):
            return config_of(kind, hub.tokenizer(name), **options)
        kinds = {
            "Qwen2": "Qwen2", "Qwen3-30B": "Qwen3Moe", "Qwen3": "Qwen3", "Llama": "Llama", "pythia": "GPTNeoX", "opt": "OPT",
        }  # fmt: skip
        kind = next(kind for part, kind in kinds.items() if part in name)
        padding = None if kind == "Llama" else hub.tokenizer(name).pad_token_id
        made = {"vocab_size": hub.bpe.get_vocab_size(), "pad_token_id": padding} | options
        return getattr(transformers, f"{kind}Config")(**made)

    common.push_to_hub = push
    AutoTokenizer.from_pretrained = lambda name, **_: hub.tokenizer(name)
    AutoProcessor.from_pretrained = processor
    GenerationConfig.from_pretrained = generation
    AutoConfig.from_pretrained = config
    small_ids = {
        "pad_token_id": 6,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }  # these scripts' own are beyond the vocabulary
    for folder in ("for_causal_lm", "for_sequence_classification", "for_conditional_generation"):
        for script in sorted((source / "scripts/generate_tiny_models" / folder).glob("[a-z]*.py")):
            if folder == "for_conditional_generation" and not (images and kind_of(_model_of(script))):
                continue
            for kind in (transformers.Olmo3Config, transformers.Phi3Config):
                # The module transformers replaces itself when it imports a model.
                setattr(
                    sys.modules["transformers"], kind.__name__, lambda kind=kind, **options: kind(**options | small_ids)
                )
            if not script.stem.startswith("peft_"):
                torch.manual_seed(0)
                importlib.import_module(f"scripts.generate_tiny_models.{folder}.{script.stem}")


def _model_of(script: Path) -> str:
    """Return the hub's model of which a script of TRL makes a tiny one."""
    return re.search(r'^MODEL_ID = "(.*)"', script.read_text(encoding="utf-8"), re.MULTILINE)[1]


def _models_of_peft(hub: Hub) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4}
    llama = {"hidden_size": 16, "intermediate_size": 64, **sizes}
    gpt = {"n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 512}
    opt = {"word_embed_proj_dim": 16, "hidden_size": 16, "ffn_dim": 4, "num_attention_heads": 4, "num_hidden_layers": 5}
    wide_opt = {
        "word_embed_proj_dim": 32,
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 12,
    }
    peft, hf, trl = "peft-internal-testing", "hf-internal-testing", "trl-internal-testing"
    shapes: dict[str, tuple[str, dict[str, Any]]] = {
        f"{peft}/tiny-random-OPTForCausalLM": ("OPT", opt | {"max_position_embeddings": 100}),
        f"{peft}/opt-125m": ("OPT", wide_opt | {"max_position_embeddings": 512}),
        f"{peft}/tiny-random-GPT2LMHeadModel": ("GPT2", gpt),
        f"{peft}/tiny-random-gpt2": ("GPT2", gpt),
        f"{hf}/tiny-random-gpt2": ("GPT2", gpt),
        f"{peft}/tiny-random-GPTJForCausalLM": ("GPTJ", gpt | {"rotary_dim": 4}),
        f"{peft}/tiny-random-GPTNeoXForCausalLM": (
            "GPTNeoX", {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 5, "num_attention_heads": 4},
        ),
        f"{peft}/tiny-random-BloomForCausalLM": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
        **{f"{owner}/tiny-random-LlamaForCausalLM": ("Llama", llama) for owner in (peft, hf, trl)},
        f"{hf}/tiny-random-MistralForCausalLM": ("Mistral", llama | {"num_key_value_heads": 2}),
        f"{trl}/tiny-Llama4ForCausalLM": (
            "Llama4Text", llama | {"intermediate_size_mlp": 64, "num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 4},
        ),
        f"{peft}/tiny-dummy-qwen2": (
            "Qwen2",
            {"hidden_size": 8, "intermediate_size": 16, "num_key_value_heads": 2, "tie_word_embeddings": True, **sizes},
        ),
        f"{hf}/tiny-random-Gemma3ForCausalLM": (
            "Gemma3Text", {"hidden_size": 32, "intermediate_size": 37, "num_key_value_heads": 2, "head_dim": 8, **sizes},
        ),
        f"{trl}/tiny-T5ForConditionalGeneration": (
            "T5", {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        ),
    }  # fmt: skip
    for repository, (kind, options) in shapes.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(vocab_size=hub.bpe.get_vocab_size(), **options)
        auto = transformers.AutoModelForSeq2SeqLM if kind == "T5" else transformers.AutoModelForCausalLM
        hub.save(repository, auto.from_config(config), hub.tokenizer(repository.split("/")[1]))
