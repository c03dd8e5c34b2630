"""BPE with byte fallback (Llama 2, Mistral, Gemma) as llama.cpp has it: pairs are joined in the order of their token's score."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from horizon_lm.errors import ModelNotSupportedError

_SPACE = "\u2581"
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_BYTES = frozenset(f"<0x{number:02X}>" for number in range(256))


class Scored(NamedTuple):
    """The scores of all tokens that merges make, whether text gets a space before it, and a line on differences."""

    scores: dict[str, float]
    add_space_prefix: bool
    notes: list[str]


def scored(described: dict[str, Any], path: Path) -> Scored:
    """Return the scores with which llama.cpp joins the same pairs as a tokenizer's merges.

    Args:
        described: the content of ``tokenizer.json``.
        path: that file, for messages.

    Raises:
        ModelNotSupportedError: no scores have the effect of the merges, or text is prepared in a way that llama.cpp does not have.
    """
    model = described["model"]
    lacks_bytes = not model["vocab"].keys() >= _BYTES
    if lacks_bytes or model.get("dropout") or model.get("ignore_merges") or model.get("continuing_subword_prefix"):
        raise ModelNotSupportedError(f"{path}: this kind of BPE with byte fallback is not written as GGUF")
    prefix, notes = _space_prefix(described, path)
    return Scored(_scores(described, path), prefix, notes)


def is_byte(token: str) -> bool:
    """Return whether a token stands for a byte."""
    return token in _BYTES


def as_in_text(token: str) -> str:
    """Return an added token as llama.cpp looks for it: in text whose spaces are not replaced yet."""
    return token.replace(_SPACE, " ")


def _scores(described: dict[str, Any], path: Path) -> dict[str, float]:
    """Return scores in the order of the merges: 0 for the tokens that are made first, then -1, ..."""
    model, added = described["model"], {each["content"] for each in described["added_tokens"]}
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    scores: dict[str, float] = {}
    for rank, equals in enumerate(_ranks(pairs)):
        tokens, lengths = {"".join(pair) for pair in equals}, [(len(first), len(second)) for first, second in equals]
        if len(tokens) > 1 and lengths != sorted(lengths, reverse=True):
            raise ModelNotSupportedError(f"{path}: no score of {min(tokens)!r} has the effect of its merges")
        scores |= dict.fromkeys(tokens, -float(rank))
    merged = set(pairs)
    for token in model["vocab"].keys() - added:
        for cut in range(1, len(token)):
            pair = (token[:cut], token[cut:])
            if pair not in merged and all(part in model["vocab"] and part not in added for part in pair):
                raise ModelNotSupportedError(
                    f"{path}: llama.cpp joins {' and '.join(map(repr, pair))}, which no merge does"
                )
    return scores


def _ranks(pairs: list[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """Yield the merges of each token, or of tokens between whose merges there are others of them.

    The latter is how transformers writes merges of tokens with equal scores, such as runs of spaces: by length.
    """
    ends = {"".join(pair): index for index, pair in enumerate(pairs)}
    start = end = 0
    for index, pair in enumerate(pairs):
        if index > end:
            yield pairs[start:index]
            start = index
        end = max(end, ends["".join(pair)])
    yield pairs[start:]


def _space_prefix(described: dict[str, Any], path: Path) -> tuple[bool, list[str]]:
    """Return whether llama.cpp adds a space to the beginning of text, and lines on where the tokenizer does not."""
    normalizers = _parts(described.get("normalizer"), "normalizers")
    splits = _parts(described.get("pre_tokenizer"), "pretokenizers")
    if normalizers == [_PREPEND, _REPLACE] and not splits:
        spaced = [each["content"] for each in described["added_tokens"] if each["normalized"]]
        after = f"llama.cpp finds the added tokens {', '.join(spaced)} anywhere in text, but the tokenizer only after a space"
        return True, [after] if spaced else []
    if normalizers == [_REPLACE] and splits in ([], [_SPLIT]):
        return False, []
    if not normalizers and [part["type"] for part in splits] == ["Metaspace"]:
        space = splits[0]
        if space["replacement"] == _SPACE and space.get("split") is False:
            scheme = space.get("prepend_scheme", "always")
            more = "before text that begins with a space, llama.cpp adds one more than the tokenizer"
            if scheme == "first":
                more = f"after special tokens, and {more}"
            return scheme != "never", [more] if scheme != "never" else []
    raise ModelNotSupportedError(f"{path}: llama.cpp does not have this tokenizer's way of preparing text")


def _parts(described: dict[str, Any] | None, kind: str) -> list[dict[str, Any]]:
    """Return the members of a sequence of normalizers or splits, or the only one."""
    if described is None:
        return []
    found: list[dict[str, Any]] = described.get(kind, [described])
    return found
