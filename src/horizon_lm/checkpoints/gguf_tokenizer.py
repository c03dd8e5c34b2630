"""The tokenizer of a folder as metadata of a GGUF file: byte-level BPE, whose way of splitting text llama.cpp knows by name."""

import json
from pathlib import Path
from typing import Any

from horizon_lm.errors import ConfigError, ModelNotSupportedError, first_line

_FILE = "tokenizer.json"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
_SPLITS = {None: "gpt-2", _QWEN2: "qwen2", _LLAMA3: "llama-bpe"}


def add_tokenizer(gguf: Any, writer: Any, folder: Path, vocab_size: int) -> None:
    """Add tokens, merges, special tokens and the chat template of a folder's tokenizer to a GGUF file.

    Args:
        gguf: the package.
        writer: its writer of the file.
        folder: the folder.
        vocab_size: rows of the embedding; those that the tokenizer does not use get tokens that are never produced.

    Raises:
        ConfigError: the folder has no ``tokenizer.json``, or one with more tokens.
        ModelNotSupportedError: the tokenizer is not byte-level BPE, or splits text in a way that llama.cpp has no name for.
    """
    path = folder / _FILE
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        split = _split(described, path)
        tokens, types = _tokens(gguf, described, vocab_size)
    except ModelNotSupportedError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read ({first_line(error)}); save the tokenizer again") from error
    if len(tokens) > vocab_size:
        raise ConfigError(
            f"{path} has {len(tokens):,} tokens, but the model {vocab_size:,}; use the tokenizer of the model"
        )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size).add_to_gguf(writer, quiet=True)


def _split(described: dict[str, Any], path: Path) -> str:
    """Return llama.cpp's name of the way in which a tokenizer splits text."""
    model, normalizer = described["model"], described.get("normalizer") or {"type": "NFC"}
    before = described.get("pre_tokenizer") or {"type": None}
    parts = {part["type"]: part for part in before.get("pretokenizers", [before])}
    level, split = parts.pop("ByteLevel", None), parts.pop("Split", None)
    pattern = split["pattern"].get("Regex") if split else None
    if model["type"] != "BPE" or model.get("byte_fallback") or normalizer["type"] != "NFC" or level is None or parts:
        raise ModelNotSupportedError(f"{path}: only tokenizers of byte-level BPE are written as GGUF")
    if pattern not in _SPLITS or (split is None) != level.get("use_regex", True) or level.get("add_prefix_space"):
        raise ModelNotSupportedError(
            f"{path}: llama.cpp has no known name for the way in which this tokenizer splits text"
        )
    return _SPLITS[pattern]


def _tokens(gguf: Any, described: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the texts and the types of all tokens, by their ids."""
    texts = {number: text for text, number in described["model"]["vocab"].items()}
    kinds = dict.fromkeys(texts, gguf.TokenType.NORMAL)
    for each in described["added_tokens"]:
        texts[each["id"]] = each["content"]
        kinds[each["id"]] = gguf.TokenType.CONTROL if each["special"] else gguf.TokenType.USER_DEFINED
    numbers = range(max(vocab_size, max(texts) + 1))
    return (
        [texts.get(number, f"[PAD{number}]") for number in numbers],
        [kinds.get(number, gguf.TokenType.UNUSED) for number in numbers],
    )
