"""The tokenizer of a folder as metadata of a GGUF file: BPE, byte-level or with byte fallback."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from horizon_lm.data.gguf_splits import DIGITS, SPLITS
from horizon_lm.errors import ConfigError, ModelNotSupportedError, first_line

_FILE = "tokenizer.json"


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
    """Remove added tokens without a row in the embedding from ``described``, such as Gemma 3's for images. Return a note on them."""
    added = described["added_tokens"]
    lost = [each["content"] for each in added if each["id"] >= vocab_size]
    if not lost:
        return []
    described["added_tokens"] = [each for each in added if each["id"] < vocab_size]
    for token in lost:
        described["model"]["vocab"].pop(token, None)
    return [f"the added tokens {', '.join(lost)} are left out, because the model has no embedding of them"]


def _around_tokens(described: dict[str, Any]) -> list[str]:
    """Return a note on the added tokens that depend on the text around them; none if there are none."""
    flags = ("lstrip", "rstrip", "single_word")
    found = [each["content"] for each in described["added_tokens"] if any(each[flag] for flag in flags)]
    if not found:
        return []
    return [f"llama.cpp ignores that the added tokens {', '.join(found)} take spaces around them, or must be words"]


def _byte_level(described: dict[str, Any], folder: Path, vocab_size: int) -> Tokenizer:
    """Return a tokenizer with the merges of byte-level BPE."""
    split = _split(described, folder / _FILE)
    texts, types = _tokens(described, vocab_size, folder / _FILE)
    notes = []
    if split == SPLITS[DIGITS, False]:
        notes.append("transformers' reader does not take digits alone, as llama.cpp does")
    return Tokenizer("gpt2", split, texts, types, _special(folder, vocab_size, load_merges=True), notes=notes)


def _with_byte_fallback(described: dict[str, Any], folder: Path, vocab_size: int) -> Tokenizer:
    """Return a tokenizer with scores instead of merges: llama.cpp joins first the pair whose token has the highest score.

    Raises:
        ModelNotSupportedError: no scores have the effect of the merges, or text is prepared in a way that llama.cpp does not have.
    """
    import gguf

    model, path = described["model"], folder / _FILE
    lacks_bytes = not model["vocab"].keys() >= _BYTES
    if lacks_bytes or model.get("dropout") or model.get("ignore_merges") or model.get("continuing_subword_prefix"):
        raise ModelNotSupportedError(f"{path}: this kind of BPE with byte fallback is not written as GGUF")
    add_space_prefix, notes = _space_prefix(described, path)
    merged_scores = _scores(described, path)
    texts, types = _tokens(described, vocab_size, path)
    for number, text in enumerate(texts):
        if text == model.get("unk_token"):
            types[number] = gguf.TokenType.UNKNOWN
        elif text in _BYTES:
            types[number] = gguf.TokenType.BYTE
        elif types[number] == gguf.TokenType.USER_DEFINED:
            texts[number] = text.replace(_SPACE, " ")  # llama.cpp looks for it before spaces are replaced
    lowest = -float(len(merged_scores))  # of tokens that no merge makes
    scores = [merged_scores.get(text, lowest) for text in texts]
    special = _special(folder, vocab_size, load_merges=False)
    return Tokenizer("llama", "default", texts, types, special, scores, add_space_prefix, notes)


def _special(folder: Path, vocab_size: int, load_merges: bool) -> Any:
    """Return the special tokens of a folder, the chat template, and the merges if ``load_merges``."""
    import gguf

    special = gguf.SpecialVocab(folder, load_merges=load_merges, n_vocab=vocab_size)
    for kind in ("bos", "eos"):  # programs differ in whether they add a token if the file does not say so
        special.add_special_token.setdefault(kind, False)
    return special


def _split(described: dict[str, Any], path: Path) -> str:
    """Return llama.cpp's name of the way in which a tokenizer of byte-level BPE splits text."""
    model, normalizer = described["model"], described.get("normalizer") or {"type": "NFC"}
    before = described.get("pre_tokenizer") or {"type": None}
    parts = {part["type"]: part for part in before.get("pretokenizers", [before])}
    level, split, digits = (parts.pop(name, None) for name in ("ByteLevel", "Split", "Digits"))  # other parts are left
    pattern = split["pattern"].get("Regex") if split else None
    if digits is not None:
        pattern = DIGITS if digits["individual_digits"] and split is None else "no known pattern"
    if model["type"] != "BPE" or normalizer["type"] != "NFC" or level is None or parts:
        raise ModelNotSupportedError(
            f"{path}: only tokenizers of BPE, byte-level or with byte fallback, are written as GGUF"
        )
    way = (pattern, bool(model.get("ignore_merges")))
    splits_as_gpt2 = level.get("use_regex", True)  # by an expression of its own, which must not follow another
    if way not in SPLITS or splits_as_gpt2 != (split is None) or level.get("add_prefix_space"):
        raise ModelNotSupportedError(
            f"{path}: llama.cpp has no known name for the way in which this tokenizer splits text"
        )
    return SPLITS[way]


def _tokens(described: dict[str, Any], vocab_size: int, path: Path) -> tuple[list[str], list[int]]:
    """Return the texts and the types of all tokens, by their ids; raise ConfigError if there are more than a model has."""
    import gguf

    texts = {number: text for text, number in described["model"]["vocab"].items()}
    types = dict.fromkeys(texts, gguf.TokenType.NORMAL)
    for each in described["added_tokens"]:
        texts[each["id"]] = each["content"]
        types[each["id"]] = gguf.TokenType.CONTROL if each["special"] else gguf.TokenType.USER_DEFINED
    if max(texts) >= vocab_size:
        raise ConfigError(
            f"{path} has {max(texts) + 1:,} tokens, but the model {vocab_size:,}; use the tokenizer of the model"
        )
    numbers = range(vocab_size)
    return (
        [texts.get(number, f"[PAD{number}]") for number in numbers],
        [types.get(number, gguf.TokenType.UNUSED) for number in numbers],
    )


# BPE with byte fallback (Llama 2, Mistral, Gemma)

_SPACE = "\u2581"
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_BYTES = frozenset(f"<0x{number:02X}>" for number in range(256))


def _scores(described: dict[str, Any], path: Path) -> dict[str, float]:
    """Return scores of the tokens that merges make, in the order of the merges: 0 for the first, then -1, ...

    Raises:
        ModelNotSupportedError: by these scores, llama.cpp would join other pairs than the merges do.
    """
    model, added = described["model"], {each["content"] for each in described["added_tokens"]}
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    scores: dict[str, float] = {}
    for position, group in enumerate(_groups_by_token(pairs)):
        tokens, lengths = {"".join(pair) for pair in group}, [(len(first), len(second)) for first, second in group]
        if len(tokens) > 1 and lengths != sorted(lengths, reverse=True):
            raise ModelNotSupportedError(f"{path}: no score of {min(tokens)!r} has the effect of its merges")
        scores |= dict.fromkeys(tokens, -float(position))
    # llama.cpp joins any two tokens whose text together is a token, whether or not there is a merge of them.
    merged = set(pairs)
    for token in model["vocab"].keys() - added:
        for cut in range(1, len(token)):
            pair = (token[:cut], token[cut:])
            if pair not in merged and all(part in model["vocab"] and part not in added for part in pair):
                raise ModelNotSupportedError(
                    f"{path}: llama.cpp joins {' and '.join(map(repr, pair))}, which no merge does"
                )
    return scores


def _groups_by_token(pairs: list[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """Yield the merges in the shortest runs in which all merges of a token are in one run.

    A run has several tokens if their merges are mixed. So transformers writes those of tokens with equal scores, such as runs of
    spaces: by the lengths of the pairs.
    """
    last_index = {"".join(pair): index for index, pair in enumerate(pairs)}  # of a merge of each token
    start = end = 0
    for index, pair in enumerate(pairs):
        if index > end:
            yield pairs[start:index]
            start = index
        end = max(end, last_index["".join(pair)])
    yield pairs[start:]


def _space_prefix(described: dict[str, Any], path: Path) -> tuple[bool, list[str]]:
    """Return whether llama.cpp adds a space before text, and notes on where it adds one and the tokenizer does not."""
    normalizers = _parts(described.get("normalizer"), "normalizers")
    splits = _parts(described.get("pre_tokenizer"), "pretokenizers")
    if normalizers == [_PREPEND, _REPLACE] and not splits:
        spaced = [each["content"] for each in described["added_tokens"] if each["normalized"]]
        note = f"llama.cpp finds the added tokens {', '.join(spaced)} anywhere in text, but the tokenizer only after a space"
        return True, [note] if spaced else []
    if normalizers == [_REPLACE] and splits in ([], [_SPLIT]):
        return False, []
    if not normalizers and [part["type"] for part in splits] == ["Metaspace"]:
        space = splits[0]
        if space["replacement"] == _SPACE and space.get("split") is False:
            scheme = space.get("prepend_scheme", "always")
            if scheme == "never":
                return False, []
            note = "before text that begins with a space, llama.cpp adds one more than the tokenizer"
            return True, [f"after special tokens, and {note}" if scheme == "first" else note]
    raise ModelNotSupportedError(f"{path}: llama.cpp does not have this tokenizer's way of preparing text")


def _parts(described: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the parts of a normalizer or splitter: those that it has under ``key``, or itself; none if there is no such thing."""
    if described is None:
        return []
    parts: list[dict[str, Any]] = described.get(key, [described])
    return parts
