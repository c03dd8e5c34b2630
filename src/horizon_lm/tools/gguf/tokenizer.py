"""The tokenizer of a folder as metadata of a GGUF file: BPE, byte-level or with byte fallback."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from horizon_lm.errors import ConfigError, ModelNotSupportedError
from horizon_lm.runs.data.gguf_tokenizer import DIGITS, SPLITS
from horizon_lm.runs.data.tokenizer_opening import open_tokenizer
from horizon_lm.tools.gguf.special_tokens import SpecialTokens, leave_out, notes_on_added, read_special_tokens


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as a GGUF file has it.

    Attributes:
        model: llama.cpp's name of the algorithm, ``gpt2`` or ``llama``.
        split: llama.cpp's name of the way in which text is split.
        tokens: texts of all tokens, by their ids.
        types: their types.
        special: special tokens and the chat template.
        merges: pairs that are joined, if the algorithm has them.
        scores: scores of the tokens, if the algorithm has them.
        add_space_prefix: whether text gets a space before it.
        notes: lines on what llama.cpp does differently.
    """

    model: str
    split: str
    tokens: list[str]
    types: list[int]
    special: SpecialTokens
    merges: list[str] | None = None
    scores: list[float] | None = None
    add_space_prefix: bool = False
    notes: list[str] = field(default_factory=list)

    def add_to(self, writer: Any) -> None:
        """Add the tokenizer to the package's writer of a file."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.split)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.add_space_prefix)
        self.special.add_to(writer)


def read_tokenizer(folder: Path, vocab_size: int, generation_config: Any) -> Tokenizer:
    """Return the tokenizer of a folder as transformers opens it, which is not always as its ``tokenizer.json`` describes it.

    Args:
        folder: the folder.
        vocab_size: rows of the embedding; those that the tokenizer does not use get tokens that are never produced.
        generation_config: the generation config of the model, for the tokens that end an answer.

    Raises:
        ConfigError: the folder has no tokenizer that can be read, or one with more tokens.
        ModelNotSupportedError: llama.cpp does not have the algorithm, or no name for the way in which text is split, or no file
            can say what the tokenizer adds to a text.
    """
    from tokenizers.models import BPE

    opened = open_tokenizer(folder)
    if not opened.is_fast or not isinstance(opened.backend_tokenizer.model, BPE):
        raise _unknown_kind(folder)
    added = {token.content for token in opened.added_tokens_decoder.values()}
    num_tokens = 1 + max((number for text, number in opened.get_vocab().items() if text not in added), default=0)
    if num_tokens > vocab_size:  # before a list is made of them
        raise ConfigError(
            f"{folder} has {num_tokens:,} tokens, but the model {vocab_size:,}; use the tokenizer of the model"
        )
    described = json.loads(opened.backend_tokenizer.to_str())
    model = described["model"]
    if model["dropout"] or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        raise ModelNotSupportedError(
            f"{folder}: BPE with dropout, or with marks of parts of words, is not written as GGUF"
        )
    special = read_special_tokens(opened, folder, vocab_size, generation_config)
    notes = [*leave_out(described, vocab_size), *notes_on_added(described["added_tokens"])]
    build = _with_byte_fallback if model["byte_fallback"] else _byte_level
    tokenizer = build(described, special, folder, vocab_size)
    if len(set(tokenizer.tokens)) < len(tokenizer.tokens):  # in llama.cpp's form of texts
        raise ModelNotSupportedError(f"{folder}: two tokens have the same text, with which llama.cpp opens no file")
    return replace(tokenizer, notes=[*tokenizer.notes, *notes, *special.notes])


def _unknown_kind(folder: Path) -> ModelNotSupportedError:
    """Return the error for a tokenizer of another kind."""
    return ModelNotSupportedError(
        f"{folder}: only tokenizers of BPE, byte-level or with byte fallback, are written as GGUF"
    )


def _byte_level(described: dict[str, Any], special: SpecialTokens, folder: Path, vocab_size: int) -> Tokenizer:
    """Return a tokenizer with the merges of byte-level BPE."""
    split, normalizers = _split(described, folder), _parts(described["normalizer"], "normalizers")
    if any(each["type"] != "NFC" for each in normalizers):
        raise ModelNotSupportedError(f"{folder}: llama.cpp does not have this tokenizer's way of preparing text")
    texts, types = _tokens(described, vocab_size)
    notes = []
    if normalizers:
        notes.append("llama.cpp does not normalize text (NFC), so text in another form has other tokens")
    if split == SPLITS[DIGITS, False]:
        notes.append("transformers' reader does not take digits alone, as llama.cpp does")
    merges = [" ".join(pair) for pair in _merges(described["model"])]
    return Tokenizer("gpt2", split, texts, types, special, merges=merges, notes=notes)


def _with_byte_fallback(described: dict[str, Any], special: SpecialTokens, folder: Path, vocab_size: int) -> Tokenizer:
    """Return a tokenizer with scores instead of merges: llama.cpp joins first the pair whose token has the highest score. Added tokens that
    llama.cpp would not find, but merges make, are removed from ``described``.

    Raises:
        ModelNotSupportedError: no scores have the effect of the merges, or text is prepared in a way that llama.cpp does not have.
    """
    import gguf

    model = described["model"]
    if not model["vocab"].keys() >= _BYTES or model["ignore_merges"]:
        raise ModelNotSupportedError(f"{folder}: this kind of BPE with byte fallback is not written as GGUF")
    add_space_prefix, notes = _space_prefix(described, folder)
    merged = {"".join(pair) for pair in _merges(model)}
    # Added tokens with spaces that were replaced are not found in text as it is. Merges make them, as in Gemma.
    added = [each for each in described["added_tokens"] if not (_is_of_spaces(each) and each["content"] in merged)]
    described["added_tokens"], normalized = added, {each["content"] for each in added if each["normalized"]}
    merged_scores = _scores(described, folder)
    texts, types = _tokens(described, vocab_size)
    if spaced := sorted(text for text in normalized if _SPACE in text):
        notes.append(f"llama.cpp finds the added tokens {', '.join(spaced)} in text with spaces, but not with {_SPACE}")
    for number, text in enumerate(texts):
        if text == model["unk_token"] and types[number] == gguf.TokenType.CONTROL:
            types[number] = gguf.TokenType.UNKNOWN
        elif text in _BYTES:
            types[number] = gguf.TokenType.BYTE
        elif types[number] == gguf.TokenType.USER_DEFINED and text in normalized:
            texts[number] = text.replace(_SPACE, " ")  # llama.cpp looks for it before spaces are replaced
    lowest = -float(len(merged_scores))  # of tokens that no merge makes
    scores = [merged_scores.get(text, lowest) for text in texts]
    return Tokenizer(
        "llama", "default", texts, types, special, scores=scores, add_space_prefix=add_space_prefix, notes=notes
    )


def _is_of_spaces(added: dict[str, Any]) -> bool:
    """Return whether an added token has spaces that were replaced, and is looked for in text in which they were not."""
    return _SPACE in added["content"] and not added["special"] and not added["normalized"]


def _merges(model: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the pairs that a tokenizer of BPE joins, in their order."""
    return [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]


def _split(described: dict[str, Any], folder: Path) -> str:
    """Return llama.cpp's name of the way in which a tokenizer of byte-level BPE splits text."""
    *before, level = _parts(described["pre_tokenizer"], "pretokenizers") or [{"type": None}]
    if level["type"] != "ByteLevel":
        raise _unknown_kind(folder)
    pattern = _pattern(before)
    name = SPLITS.get((pattern, described["model"]["ignore_merges"]))
    splits_as_gpt2 = pattern in (None, DIGITS)  # by an expression of its own, which must not follow another
    if name is None or level["use_regex"] != splits_as_gpt2 or level["add_prefix_space"]:
        raise ModelNotSupportedError(
            f"{folder}: llama.cpp has no known name for the way in which this tokenizer splits text"
        )
    return name


def _pattern(before: list[dict[str, Any]]) -> str | None:
    """Return the expression by which text is split before its bytes are mapped; None if text is not split then, and an empty text if it is
    split in a way that no expression describes.
    """
    match before:
        case []:
            return None
        case [{"type": "Digits", "individual_digits": True}]:
            return DIGITS
        case [{"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}]:
            return pattern
        # The same split by an expression that matches all text, as all expressions with a name do.
        case [{"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Removed", "invert": True}]:
            return pattern
    return ""


def _tokens(described: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the texts and the types of all tokens, by their ids."""
    import gguf

    texts = {number: text for text, number in described["model"]["vocab"].items()}
    types = dict.fromkeys(texts, gguf.TokenType.NORMAL)
    for each in described["added_tokens"]:
        texts[each["id"]] = each["content"]
        types[each["id"]] = gguf.TokenType.CONTROL if each["special"] else gguf.TokenType.USER_DEFINED
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


def _scores(described: dict[str, Any], folder: Path) -> dict[str, float]:
    """Return scores of the tokens that merges make, in the order of the merges: 0 for the first, then -1, ...

    Raises:
        ModelNotSupportedError: by these scores, llama.cpp would join other pairs than the merges do.
    """
    model, added = described["model"], {each["content"] for each in described["added_tokens"]}
    pairs = _merges(model)
    scores: dict[str, float] = {}
    for position, group in enumerate(_groups_by_token(pairs)):
        tokens, lengths = {"".join(pair) for pair in group}, [(len(first), len(second)) for first, second in group]
        if len(tokens) > 1 and lengths != sorted(lengths, reverse=True):
            raise ModelNotSupportedError(f"{folder}: no score of {min(tokens)!r} has the effect of its merges")
        scores |= dict.fromkeys(tokens, -float(position))
    # llama.cpp joins any two tokens whose text together is a token, whether or not there is a merge of them.
    merged = set(pairs)
    for token in model["vocab"].keys() - added:
        for cut in range(1, len(token)):
            pair = (token[:cut], token[cut:])
            if pair not in merged and all(part in model["vocab"] and part not in added for part in pair):
                raise ModelNotSupportedError(
                    f"{folder}: llama.cpp joins {' and '.join(map(repr, pair))}, which no merge does"
                )
    return scores


def _groups_by_token(pairs: list[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """Yield the merges in order, cut into the shortest groups such that all merges of a token are in one group.

    A group has several tokens if their merges alternate. transformers writes merges in this way for tokens with equal scores, such as runs
    of spaces, which it sorts by the lengths of the pairs.
    """
    last_index = {"".join(pair): index for index, pair in enumerate(pairs)}  # of a merge of each token
    start = end = 0  # of the group: its first merge, and the last merge of any of its tokens
    for index, pair in enumerate(pairs):
        if index > end:
            yield pairs[start:index]
            start = index
        end = max(end, last_index["".join(pair)])
    yield pairs[start:]


def _space_prefix(described: dict[str, Any], folder: Path) -> tuple[bool, list[str]]:
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
        metaspace = splits[0]
        if metaspace["replacement"] == _SPACE and metaspace.get("split") is False:
            scheme = metaspace.get("prepend_scheme", "always")
            if scheme == "never":
                return False, []
            note = "before text that begins with a space, llama.cpp adds one more than the tokenizer"
            return True, [f"after special tokens, and {note}" if scheme == "first" else note]
    raise ModelNotSupportedError(f"{folder}: llama.cpp does not have this tokenizer's way of preparing text")


def _parts(described: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the parts of a normalizer or splitter: its items under ``key``, or else itself; none if it is None."""
    if described is None:
        return []
    parts: list[dict[str, Any]] = described.get(key, [described])
    return parts
