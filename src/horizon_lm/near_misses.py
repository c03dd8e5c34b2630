"""Find what a mistyped name was meant to be. A name of another meaning is worse than none."""

import difflib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SAME_WORD = 0.75  # similarity from which two words are spellings of one
_FEW = 3  # names in one suggestion, at most
_SUFFIXES = re.compile(r"(?<=.)(\.[A-Za-z]\w*)+$")  # of files; not the end of Llama-3.1-8B
_SIZE = re.compile(r"(?<![a-z0-9.])(?:\d+x)?\d+(?:\.\d+)?[bm](?![a-z0-9])")


def closest_setting(typed: str, known: Iterable[str]) -> str | None:
    """Return the setting that a name is a misspelling of, or has too many or too few words of; None if there is none.

    ``max_samples`` is not ``max_steps``: a word of one meaning stands in the place of another.
    """
    for name in difflib.get_close_matches(typed, list(known), n=3):
        if not (_words_without_match(typed, name) and _words_without_match(name, typed)):
            return name
    return None


def _words_without_match(name: str, other: str) -> list[str]:
    """Return the words of a name that are no spellings of words of another."""
    return [word for word in name.split("_") if not difflib.get_close_matches(word, other.split("_"), 1, _SAME_WORD)]


def closest_model(typed: str, known: Iterable[str]) -> str | None:
    """Return the model of the same family, version and size whose name is the most similar; None if there is none.

    A name may lack the version or its end, as llama-3-8b and qwen-7b do, if it is that of one version alone.
    """
    has_owner = "/" in typed
    names = {(name if has_owner else name.rpartition("/")[2]).casefold(): name for name in known}
    wanted = _Numbers.of(typed)
    same_numbers = [each for each in names if _Numbers.of(each) == wanted]
    close = difflib.get_close_matches(typed.casefold(), same_numbers, n=1)
    if not close and wanted.size:
        longer = [each for each in names if _is_longer(each, typed)]
        is_one_version = len({_Numbers.of(each) for each in longer}) == 1
        if wanted.version or is_one_version:
            close = difflib.get_close_matches(typed.casefold(), longer, n=1, cutoff=0)
    return names[close[0]] if close else None


def _is_longer(name: str, typed: str) -> bool:
    """Return whether a model's name differs from the one typed by a longer version and by words behind the size."""
    own, wanted = _Numbers.of(name), _Numbers.of(typed)
    same_version = own.size == wanted.size and own.version[: len(wanted.version)] == wanted.version
    same_owner = "/" not in typed or name.partition("/")[0] == typed.casefold().partition("/")[0]
    return same_version and same_owner and _family(name) == _family(typed)


def closest_machines(typed: str, known: Iterable[str]) -> list[str]:
    """Return the machine with the most similar name; else the few machines that have a number in common with it, such as 4090.

    Names are similar only if one has all digits of the other. The list is empty if there are none.
    """
    typed, known = typed.casefold(), list(known)
    typed_digits = Counter(filter(str.isdigit, typed))
    beginning_so = [name for name in known if typed and name.startswith(typed)]
    for name in beginning_so or difflib.get_close_matches(typed, known, 3, _SAME_WORD):
        digits = Counter(filter(str.isdigit, name))
        if digits <= typed_digits or typed_digits <= digits:
            return [name]
    return _with_number_of(typed, known)


def _with_number_of(typed: str, known: Iterable[str]) -> list[str]:
    """Return the machines that have a number of the name typed; those that have one of its words, too, if there are any.

    Variants of a machine that is found are left out. The list is empty if more than a few are left.
    """
    numbers, words = set(re.findall(r"(?<![a-z\d])\d{3,}", typed)), set(re.findall(r"[a-z]+", typed))
    found = [name for name in known if numbers & set(re.findall(r"\d+", name))]
    found = [name for name in found if words & set(name.split("-")[1:])] or found
    found = [name for name in found if not any(name.startswith(f"{other}-") for other in found)]
    return found if len(found) <= _FEW else []


def closest_path(typed: str | Path) -> Path | None:
    """Return the existing path whose parts have the names of the one typed, or similar ones; None if a part has none.

    Suffixes do not count: ``train.json`` is meant to be ``train.jsonl``, and ``eval.jsonl`` is not.
    """
    path = Path(typed)
    try:
        path = path.expanduser()
        found = Path(path.anchor)
        for part in path.relative_to(path.anchor).parts:
            name = part if (found / part).exists() else _closest_name(part, [each.name for each in found.iterdir()])
            if name is None:
                return None
            found /= name
    except (OSError, ValueError, RuntimeError):
        return None  # no folder, not ours to list, no path at all, or the home of an unknown user
    return found


def _closest_name(typed: str, names: Iterable[str]) -> str | None:
    """Return the name whose stem is the most similar to that of the one typed, and of several the most similar; None for none."""
    stems = {name: _SUFFIXES.sub("", name).casefold() for name in names}
    close = difflib.get_close_matches(_SUFFIXES.sub("", typed).casefold(), set(stems.values()), 1, _SAME_WORD)
    same_stem = [name for name, stem in stems.items() if stem in close]
    return max(same_stem, key=lambda name: difflib.SequenceMatcher(a=typed, b=name).ratio(), default=None)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers in a model's name: those of its version, and its size, such as 7b; without a size, all are of the version."""

    version: tuple[str, ...]
    size: str

    @classmethod
    def of(cls, name: str) -> "_Numbers":
        base, size = _divide(name)
        return cls(tuple(re.findall(r"\d+", base)), size)


def _family(name: str) -> list[str]:
    """Return the words before the size in a model's name, such as ["llama"]."""
    return [word for word in re.findall(r"[a-z]+", _divide(name)[0]) if word != "meta"]  # Meta-Llama is Llama


def _divide(name: str) -> tuple[str, str]:
    """Return the part of a model's name before its size, and the size; the whole name if it has none."""
    name = name.rpartition("/")[2].casefold()
    size = _SIZE.search(name)
    return (name[: size.start()], size[0]) if size else (name, "")
