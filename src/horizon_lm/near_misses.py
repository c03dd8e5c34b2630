"""Find what a mistyped name was meant to be. A name of another meaning is worse than none."""

import difflib
import re
from collections import Counter
from collections.abc import Iterable

_SAME_WORD = 0.75  # similarity from which two words are spellings of one
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
    """Return the model of the same family and size whose name is the most similar; None if there is none."""
    in_full = "/" in typed
    candidates = {
        (name if in_full else name.rpartition("/")[2]).casefold(): name
        for name in known
        if _version_and_size(name) == _version_and_size(typed)
    }
    close = difflib.get_close_matches(typed.casefold(), list(candidates), n=1)
    return candidates[close[0]] if close else None


def closest_machine(typed: str, known: Iterable[str]) -> str | None:
    """Return the machine of the most similar name, whose digits are those typed but for some more or fewer; None if there is none."""
    typed, known = typed.casefold(), list(known)
    digits = Counter(filter(str.isdigit, typed))
    begun = [name for name in known if typed and name.startswith(typed)]
    for name in begun or difflib.get_close_matches(typed, known, 3, _SAME_WORD):
        own = Counter(filter(str.isdigit, name))
        if own <= digits or digits <= own:
            return name
    return None


def _version_and_size(name: str) -> tuple[str, ...]:
    """Return the numbers in a model's name up to its size, such as ("2.5", "7b"); all of them if it has none."""
    name = name.rpartition("/")[2].casefold()
    size = _SIZE.search(name)
    return (*re.findall(r"\d+(?:\.\d+)*", name[: size.start()] if size else name), *([size[0]] if size else []))
