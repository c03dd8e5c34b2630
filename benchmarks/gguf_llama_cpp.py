"""Compare exported GGUF files in llama.cpp with their models and tokenizers in transformers.

    python benchmarks/gguf_llama_cpp.py --library LIBRARY [--output FILE.md]

LIBRARY is a shared library with llama.cpp's functions: libllama.so, or the extension module of the package xllamacpp. Models are
tiny and have random weights, large enough that positions matter; tokenizers are trained on the pages of docs.
"""

import argparse
import random
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
from llama_cpp_library import CONTEXT, LlamaCpp
from peers_cpu import processor, versions
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from horizon_lm.runs.data.gguf_tokenizer import SPLIT_BY_PRE, SPLITS, Split, splitter
from horizon_lm.tools.gguf.export import FILE, export_gguf

TOKENS = 120
SIZES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA = {"tie_word_embeddings": True, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"rope_theta": 1e4, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
LONGROPE = {
    "rope_type": "longrope", "partial_rotary_factor": 0.75, "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "short_factor": [1.0] * 6,
}  # fmt: skip
WINDOW = {"rope_type": "default", "rope_theta": 1e4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, llama3 scaling": ("llama", {"rope_parameters": LLAMA3 | ORIGINAL}),
    "llama, yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0} | ORIGINAL}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.5, "embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.22},
    ),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "mixtral": ("mixtral", EXPERTS),
    "qwen2": ("qwen2", {}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0} | ORIGINAL}),
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True, "head_dim": 32}),
    "gemma": ("gemma", {"tie_word_embeddings": True, "head_dim": 32}),
    "gemma2": ("gemma2", GEMMA),
    "gemma2, layers of 27B": ("gemma2", GEMMA | {"num_hidden_layers": 46, "query_pre_attn_scalar": 16}),
    "gemma3_text": ("gemma3_text", GEMMA | {"num_hidden_layers": 7}),
    "gemma3_text, linear": (
        "gemma3_text",
        GEMMA | {"num_hidden_layers": 7, "rope_parameters": {"full_attention": LINEAR, "sliding_attention": WINDOW}},
    ),
    "gemma3_text, layers of 27B": ("gemma3_text", GEMMA | {"num_hidden_layers": 62, "query_pre_attn_scalar": 16}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3, longrope, three quarters of a head": (
        "phi3",
        {"sliding_window": None, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE | ORIGINAL},
    ),
}


def byte_level(split: Split, text: str) -> Any:
    """Return a tokenizer of byte-level BPE that splits text in one of the ways that llama.cpp knows."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=split.ignores_merges))
    tokenizer.pre_tokenizer = splitter(split)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"], special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def byte_fallback(prepend: bool, text: str) -> Any:
    """Return a tokenizer of BPE with byte fallback, whose merges are those that transformers makes of scores."""
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = pre_tokenizers.Metaspace()
    draft.train_from_iterator([text], trainers.BpeTrainer(vocab_size=700, show_progress=False))
    learned = sorted(draft.get_vocab(), key=draft.get_vocab().__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256)), *learned]
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    merges = generate_merges(vocab, {token: -float(number) for token, number in vocab.items()})
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if prepend else spaces
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def save_model(folder: Path, model_type: str, settings: dict[str, Any]) -> None:
    """Write a model whose matrices are random and whose norms are not equal."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | settings))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.2)
        else:
            parameter.data.add_(torch.randn(parameter.shape), alpha=0.1)
    model.save_pretrained(folder)


@torch.no_grad()
def compare(
    llama_cpp: LlamaCpp, folder: Path, model_type: str, settings: dict[str, Any], tokenizer: Any
) -> list[float]:
    """Return the median relative errors of logits in llama.cpp: to transformers', and to its own with swapped positions."""
    save_model(folder / "model", model_type, settings)
    tokenizer.save_pretrained(folder / "model")
    export_gguf(folder / "model", folder / "out")
    ids = torch.randint(5, SIZES["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
    with llama_cpp.opened(folder / "out" / FILE) as opened:
        found = llama_cpp.logits(opened, ids[0].tolist(), SIZES["vocab_size"])
    positions = torch.arange(TOKENS)[None]
    errors = []
    for chosen in (positions, 2 * positions):
        expected = model(ids, position_ids=chosen).logits[0]
        errors.append(((found - expected).norm(dim=1) / expected.norm(dim=1)).median().item())
    return errors


def sample_texts(text: str) -> list[str]:
    """Return pieces of a text, and random characters of many scripts."""
    drawn = random.Random(0)
    starts = [drawn.randrange(len(text)) for _ in range(300)]
    pieces = [text[start : start + drawn.randrange(1, 200)] for start in starts]
    ranges = (
        range(32, 127),
        range(32, 127),
        range(160, 0x3000),
        range(0x4E00, 0x5000),
        range(0x1F600, 0x1F640),
        (10, 32),
    )
    scripts = [
        "".join(chr(drawn.choice(drawn.choice(ranges))) for _ in range(drawn.randrange(1, 40))) for _ in range(200)
    ]
    return pieces + scripts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--release", default="", help="the release of llama.cpp, for the page")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    llama_cpp = LlamaCpp(args.library)
    text = "\n".join(path.read_text("utf-8") for path in sorted((Path(__file__).parents[1] / "docs").glob("*.md"))[:12])
    lines = [
        "# Exported GGUF files in llama.cpp",
        "",
        f"{date.today().isoformat()}, {processor()}. {versions('torch', 'transformers', 'gguf')}. {args.release}".rstrip(),
        "Tiny models with random weights in float32; llama.cpp keeps keys and values in float16.",
        "",
        "Command: `python benchmarks/gguf_llama_cpp.py --library LIBRARY`",
        "",
        f"The median relative error of the logits of {TOKENS} tokens, beside that to the same model with positions twice as far apart, as a control.",
        "",
        "| model | error | control |",
        "|---|---|---|",
    ]
    for name, (model_type, settings) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            error, control = compare(
                llama_cpp, Path(folder), model_type, settings, byte_level(SPLIT_BY_PRE["gpt-2"], text)
            )
        lines.append(f"| {name} | {error:.4f} | {control:.2f} |")
        print(lines[-1], flush=True)
    texts = sample_texts(text)
    lines += [
        "",
        f"Texts of {len(texts)} that have other tokens in llama.cpp than in transformers.",
        "",
        "| tokenizer | other |",
        "|---|---|",
    ]
    tokenizers = {name: byte_level(SPLIT_BY_PRE[name], text) for name in SPLITS.values()}
    tokenizers |= {
        "byte fallback, a space before text": byte_fallback(True, text),
        "byte fallback, none": byte_fallback(False, text),
    }
    for name, tokenizer in tokenizers.items():
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder) / "model", "llama", {"vocab_size": len(tokenizer)})
            tokenizer.save_pretrained(Path(folder) / "model")
            export_gguf(Path(folder) / "model", Path(folder) / "out")
            with llama_cpp.opened(Path(folder) / "out" / FILE) as opened:
                other = sum(llama_cpp.tokens(opened, each) != tokenizer(each).input_ids for each in texts)
        lines.append(f"| {name} | {other} |")
        print(lines[-1], flush=True)
    if args.output is not None:
        args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
