"""Find what a mistyped name was meant to be. A name of another meaning is worse than none."""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Similarities from which two words are spellings of one.
_SAME_WORD = 0.75
_SAME_NAME = 0.8  # of words in names of models, where omni is not mini
_FEW = 3  # names in one suggestion, at most
_SUFFIXES = re.compile(r"(?<=.)(\.[A-Za-z]\w*)+$")  # of files; not the end of Llama-3.1-8B
_SIZE = re.compile(r"(?<![a-z0-9.])(?:\d+x)?\d+(?:\.\d+)?[bm](?![a-z0-9])")


def closest_setting(typed: str, known: Iterable[str]) -> str | None:
    """Return the known setting that a typed name misspells, or that it names with too many or too few words; None if there is none.

    ``max_samples`` does not stand for ``max_steps``: each has a word that the other lacks, so they are two settings.
    """
    for name in difflib.get_close_matches(typed, list(known), n=3):
        if not (_words_without_match(typed, name) and _words_without_match(name, typed)):
            return name
    return None


def _words_without_match(name: str, other: str) -> list[str]:
    """Return the words of a name that resemble no word of the other name."""
    return [word for word in name.split("_") if not difflib.get_close_matches(word, other.split("_"), 1, _SAME_WORD)]


def most_similar_first(names: Iterable[str], typed: Iterable[str]) -> list[str]:
    """Return names, those first that resemble one of the typed names most; equally similar ones in alphabetical order."""
    typed = list(typed)

    def similarity(name: str) -> float:
        return max((difflib.SequenceMatcher(a=name, b=each).ratio() for each in typed), default=0)

    return sorted(sorted(names), key=similarity, reverse=True)


def closest_model(typed: str, known: Iterable[str]) -> str | None:
    """Return the model of the same family, version and size whose name is the most similar; None if there is none.

    Each word and number of the typed name must be one of the model's, or a misspelling of it: Qwen2.5-VL-7B is another model than
    Qwen2.5-7B. The typed name may leave out the end of the version or of the name, as qwen-7b does, if models of a single version fit.
    """
    wanted = _ModelName.of(typed)
    alike = {name: parts for name in known if wanted.may_mean(parts := _ModelName.of(name))}
    same_version = [name for name, parts in alike.items() if parts.version == wanted.version]
    if not same_version and len({parts.version for parts in alike.values()}) > 1:
        return None
    # By the text that is compared: without the owner if none was typed.
    names = {(name if wanted.owner else name.rpartition("/")[2]).casefold(): name for name in same_version or alike}
    close = difflib.get_close_matches(typed.casefold(), names, n=1, cutoff=0)
    return names[close[0]] if close else None


def closest_machines(typed: str, known: Iterable[str]) -> list[str]:
    """Return the machine with the most similar name; else the few machines that have a number in common with it, such as 4090.

    Names are similar only if one has all digits of the other. The list is empty if there are none.
    """
    typed, known = typed.casefold(), list(known)
    typed_digits = Counter(filter(str.isdigit, typed))
    with_prefix = [name for name in known if typed and name.startswith(typed)]
    for name in with_prefix or difflib.get_close_matches(typed, known, 3, _SAME_WORD):
        digits = Counter(filter(str.isdigit, name))
        if digits <= typed_digits or typed_digits <= digits:
            return [name]
    return _with_number_of(typed, known)


def _with_number_of(typed: str, known: Iterable[str]) -> list[str]:
    """Return the machines whose names have a number in common with the typed name, such as 4090; of these only those that also have one
    of its words, if any do.

    If a machine is found, its variants, whose names extend its name, are left out. The list is empty if more than `_FEW` are left.
    """
    numbers, words = set(re.findall(r"(?<![a-z\d])\d{3,}", typed)), set(re.findall(r"[a-z]+", typed))
    with_number = [name for name in known if numbers & set(re.findall(r"\d+", name))]
    found = [name for name in with_number if words & set(name.split("-")[1:])] or with_number
    without_variants = [name for name in found if not any(name.startswith(f"{other}-") for other in found)]
    return without_variants if len(without_variants) <= _FEW else []


def closest_path(typed: str | Path) -> Path | None:
    """Return the existing path that a typed path was probably meant to be; None if nothing resembles one of its parts.

    Each part is taken as it is if it exists, else the most similar name in its folder. Suffixes do not count: ``train.json`` resembles
    ``train.jsonl``, and ``eval.jsonl`` does not.
    """
    path = Path(typed)
    try:
        path = path.expanduser()
        found = Path(path.anchor)  # the existing path for the parts up to here
        for part in path.relative_to(path.anchor).parts:
            name = part if (found / part).exists() else _closest_name(part, [each.name for each in found.iterdir()])
            if name is None:
                return None
            found /= name
    except (OSError, ValueError, RuntimeError):
        return None  # no folder, one that may not be listed, no path at all, or the home of an unknown user
    return found


def _closest_name(typed: str, names: Iterable[str]) -> str | None:
    """Return the name whose stem best matches the typed one; break ties by the full name. None if nothing is close."""
    stems = {name: _SUFFIXES.sub("", name).casefold() for name in names}
    close = difflib.get_close_matches(_SUFFIXES.sub("", typed).casefold(), set(stems.values()), 1, _SAME_WORD)
    same_stem = [name for name, stem in stems.items() if stem in close]
    return max(same_stem, key=lambda name: difflib.SequenceMatcher(a=typed, b=name).ratio(), default=None)


_NUMBER, _WORD = re.compile(r"\d+(?:\.\d+)*"), re.compile("[a-z]+")


@dataclass(frozen=True, slots=True)
class _ModelName:
    """The parts of a model's name, in lower case.

    Attributes:
        owner: the organization; empty if it is left out.
        family, version: words and numbers before the size; without a size, those up to the last number.
        size: its size, such as 7b; empty if the name has none.
        words, numbers: those that follow.
    """

    owner: str
    family: tuple[str, ...]
    version: tuple[str, ...]
    size: str
    words: tuple[str, ...]
    numbers: tuple[str, ...]

    @classmethod
    def of(cls, name: str) -> "_ModelName":
        """Divide a name at its size or, without one, behind its last number: family and version are before it, all else follows."""
        owner, _, base = name.casefold().rpartition("/")
        size, last_number = _SIZE.search(base), [*_NUMBER.finditer(base)][-1:]  # a list of one number, or of none
        # The size, or the empty place behind the last number, or behind a name without numbers.
        start, end = size.span() if size else (last_number[0].end(),) * 2 if last_number else (len(base),) * 2
        family = (word for word in _WORD.findall(base[:start]) if word != "meta")  # Meta-Llama is Llama
        version, behind = _NUMBER.findall(base[:start]), base[end:]
        return cls(
            owner=owner, family=tuple(family), version=tuple(version), size=size[0] if size else "",
            words=tuple(_WORD.findall(behind)), numbers=tuple(_NUMBER.findall(behind)),
        )  # fmt: skip

    def may_mean(self, other: "_ModelName") -> bool:
        """Return whether this name, as it was typed, may stand for the name of a model, ``other``."""
        return (
            self.size == other.size
            and other.version[: len(self.version)] == self.version
            and set(self.numbers) <= set(other.numbers)
            and _all_resemble(self.family, other.family)
            and _all_resemble(other.family, self.family)
            and _all_resemble(self.words, other.words)
            and (not self.owner or _all_resemble([self.owner], [other.owner]))
        )


def _all_resemble(words: Iterable[str], others: Sequence[str]) -> bool:
    """Return whether each of these words is a spelling of one of the others."""
    return all(difflib.get_close_matches(word, others, 1, _SAME_NAME) for word in words)
