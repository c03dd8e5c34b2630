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
    return [word for word in name.split("_") if not difflib.get_close_matches(word, other.split("_"), 1, _SAME_WORD)]


def closest_model(typed: str, known: Iterable[str]) -> str | None:
    """Return the model of the same family, version and size whose name is the most similar; None if there is none.

    A name may lack the version or its end, as llama-3-8b and qwen-7b do, if it is that of one version alone.
    """
    in_full = "/" in typed
    names = {(name if in_full else name.rpartition("/")[2]).casefold(): name for name in known}
    wanted = _Numbers.of(typed)
    close = difflib.get_close_matches(typed.casefold(), [each for each in names if _Numbers.of(each) == wanted], n=1)
    if not close and wanted.size:
        longer = [each for each in names if _is_longer(each, typed)]
        if wanted.version or len({_Numbers.of(each) for each in longer}) == 1:
            close = difflib.get_close_matches(typed.casefold(), longer, n=1, cutoff=0)
    return names[close[0]] if close else None


def _is_longer(name: str, typed: str) -> bool:
    """Return whether a model's name differs from the one typed by a longer version and by words behind the size."""
    own, wanted = _Numbers.of(name), _Numbers.of(typed)
    same_version = own.size == wanted.size and own.version[: len(wanted.version)] == wanted.version
    same_owner = "/" not in typed or name.partition("/")[0] == typed.casefold().partition("/")[0]
    return same_version and same_owner and _family(name) == _family(typed)


def closest_machines(typed: str, known: Iterable[str]) -> list[str]:
    """Return the machine of the most similar name, whose digits are those typed but for some more or fewer; else the few machines
    that have a number in common with it, such as 4090. The list is empty if there are none.
    """
    typed, known = typed.casefold(), list(known)
    digits = Counter(filter(str.isdigit, typed))
    begun = [name for name in known if typed and name.startswith(typed)]
    for name in begun or difflib.get_close_matches(typed, known, 3, _SAME_WORD):
        own = Counter(filter(str.isdigit, name))
        if own <= digits or digits <= own:
            return [name]
    return _with_number_of(typed, known)


def _with_number_of(typed: str, known: Iterable[str]) -> list[str]:
    """Return the machines with a number and, if there are such, a word of the name typed, without variants of others; at most a few."""
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
