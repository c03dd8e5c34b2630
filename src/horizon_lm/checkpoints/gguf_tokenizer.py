"""The tokenizer of a folder as metadata of a GGUF file: BPE, byte-level or with byte fallback."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from horizon_lm.checkpoints.gguf_sentencepiece import as_in_text, is_byte, scored
from horizon_lm.errors import ConfigError, ModelNotSupportedError, first_line

_FILE = "tokenizer.json"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+SUFFIX|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*SUFFIX|DIGITS"
_CASED += r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED.replace("SUFFIX", "").replace("DIGITS", r"\p{N}")
_GPT4O = _CASED.replace("SUFFIX", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", r"\p{N}{1,3}")
DIGITS = r"\p{N}"  # each alone, and other text as in GPT-2
# llama.cpp's names of ways to split text, by the expression and whether tokens are found without merges.
SPLITS = {
    (None, False): "gpt-2",
    (DIGITS, False): "smollm",
    (_QWEN2, False): "qwen2",
    (_LLAMA3, True): "llama-bpe",
    (_LLAMA3, False): "dbrx",
    (_TEKKEN, True): "tekken",
    (_GPT4O, False): "gpt-4o",
}


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as a GGUF file has it.

    Attributes:
        model: llama.cpp's name of the algorithm, ``gpt2`` or ``llama``.
        split: llama.cpp's name of the way in which text is split.
        tokens: texts of all tokens, by their ids.
        types: their types.
        special: special tokens, merges and the chat template, as the package gguf reads them from a folder.
        scores: scores of the tokens, if the algorithm has them.
        add_space_prefix: whether text gets a space before it.
        notes: lines on what llama.cpp does differently.
    """

    model: str
    split: str
    tokens: list[str]
    types: list[int]
    special: Any
    scores: list[float] | None = None
    add_space_prefix: bool = False
    notes: list[str] = field(default_factory=list)

    def add_to(self, writer: Any) -> None:
        """Add the tokenizer to the package's writer of a file."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.split)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.add_space_prefix)
        self.special.add_to_gguf(writer, quiet=True)


def read_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of a folder.

    Args:
        folder: the folder.
        vocab_size: rows of the embedding; those that the tokenizer does not use get tokens that are never produced.

    Raises:
        ConfigError: the folder has no ``tokenizer.json``, or one with more tokens.
        ModelNotSupportedError: llama.cpp does not have the algorithm, or no name for the way in which text is split.
    """
    path = folder / _FILE
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        notes = [*_leave_out(described, vocab_size), *_around_tokens(described)]
        read = _with_byte_fallback if described["model"].get("byte_fallback") else _byte_level
        tokenizer = read(described, folder, vocab_size)
    except (ConfigError, ModelNotSupportedError):
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read ({first_line(error)}); save the tokenizer again") from error
    return replace(tokenizer, notes=[*tokenizer.notes, *notes])


def _leave_out(described: dict[str, Any], vocab_size: int) -> list[str]:
    """Leave out added tokens without a row in the embedding, as a Gemma 3 has for images, and return a line on them."""
    added = described["added_tokens"]
    lost = [each["content"] for each in added if each["id"] >= vocab_size]
    if not lost:
        return []
    described["added_tokens"] = [each for each in added if each["id"] < vocab_size]
    for token in lost:
        described["model"]["vocab"].pop(token, None)
    return [f"the added tokens {', '.join(lost)} are left out, because the model has no embedding of them"]


def _around_tokens(described: dict[str, Any]) -> list[str]:
    """Return a line on added tokens that depend on the text around them."""
    flags = ("lstrip", "rstrip", "single_word")
    found = [each["content"] for each in described["added_tokens"] if any(each[flag] for flag in flags)]
    if not found:
        return []
    return [f"llama.cpp ignores that the added tokens {', '.join(found)} take spaces around them, or must be words"]


def _byte_level(described: dict[str, Any], folder: Path, vocab_size: int) -> Tokenizer:
    split = _split(described, folder / _FILE)
    texts, kinds = _tokens(described, vocab_size, folder / _FILE)
    notes = (
        ["transformers' reader does not take digits alone, as llama.cpp does"] if split == SPLITS[DIGITS, False] else []
    )
    return Tokenizer("gpt2", split, texts, kinds, _special(folder, vocab_size, load_merges=True), notes=notes)


def _with_byte_fallback(described: dict[str, Any], folder: Path, vocab_size: int) -> Tokenizer:
    import gguf

    found = scored(described, folder / _FILE)
    texts, kinds = _tokens(described, vocab_size, folder / _FILE)
    for number, text in enumerate(texts):
        if text == described["model"].get("unk_token"):
            kinds[number] = gguf.TokenType.UNKNOWN
        elif is_byte(text):
            kinds[number] = gguf.TokenType.BYTE
        elif kinds[number] == gguf.TokenType.USER_DEFINED:
            texts[number] = as_in_text(text)
    lowest = -float(len(found.scores))  # of tokens that no merge makes
    scores = [found.scores.get(text, lowest) for text in texts]
    special = _special(folder, vocab_size, load_merges=False)
    return Tokenizer("llama", "default", texts, kinds, special, scores, found.add_space_prefix, found.notes)


def _special(folder: Path, vocab_size: int, load_merges: bool) -> Any:
    """Return the special tokens of a folder. Those that are added to text are stated, because programs have other defaults."""
    import gguf

    special = gguf.SpecialVocab(folder, load_merges=load_merges, n_vocab=vocab_size)
    for kind in ("bos", "eos"):
        special.add_special_token.setdefault(kind, False)
    return special


def _split(described: dict[str, Any], path: Path) -> str:
    """Return llama.cpp's name of the way in which a tokenizer of byte-level BPE splits text."""
    model, normalizer = described["model"], described.get("normalizer") or {"type": "NFC"}
    before = described.get("pre_tokenizer") or {"type": None}
    parts = {part["type"]: part for part in before.get("pretokenizers", [before])}
    level, split, digits = (parts.pop(name, None) for name in ("ByteLevel", "Split", "Digits"))
    pattern = split["pattern"].get("Regex") if split else None
    if digits is not None:
        pattern = DIGITS if digits["individual_digits"] and split is None else ""
    if model["type"] != "BPE" or normalizer["type"] != "NFC" or level is None or parts:
        raise ModelNotSupportedError(
            f"{path}: only tokenizers of BPE, byte-level or with byte fallback, are written as GGUF"
        )
    way = (pattern, bool(model.get("ignore_merges")))
    if way not in SPLITS or (split is None) != level.get("use_regex", True) or level.get("add_prefix_space"):
        raise ModelNotSupportedError(
            f"{path}: llama.cpp has no known name for the way in which this tokenizer splits text"
        )
    return SPLITS[way]


def _tokens(described: dict[str, Any], vocab_size: int, path: Path) -> tuple[list[str], list[int]]:
    """Return the texts and the types of all tokens, by their ids; raise ConfigError if there are more than a model has."""
    import gguf

    texts = {number: text for text, number in described["model"]["vocab"].items()}
    kinds = dict.fromkeys(texts, gguf.TokenType.NORMAL)
    for each in described["added_tokens"]:
        texts[each["id"]] = each["content"]
        kinds[each["id"]] = gguf.TokenType.CONTROL if each["special"] else gguf.TokenType.USER_DEFINED
    if max(texts) >= vocab_size:
        raise ConfigError(
            f"{path} has {max(texts) + 1:,} tokens, but the model {vocab_size:,}; use the tokenizer of the model"
        )
    numbers = range(vocab_size)
    return (
        [texts.get(number, f"[PAD{number}]") for number in numbers],
        [kinds.get(number, gguf.TokenType.UNUSED) for number in numbers],
    )
