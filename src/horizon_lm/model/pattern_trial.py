"""Try the regular expressions of a model's files in another process, with limits on time and memory.

A regular expression of thirty characters can take longer than anybody waits, and Python's `re` has no limit.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable

from horizon_lm.common.quantities import counted
from horizon_lm.errors import ConfigError

MAX_SECONDS = 3  # of CPU; patterns of published adapters take a hundredth
_MAX_BYTES = 2**30  # of address space
_MAX_PAIRS = 2**22  # of a text and a name
_SPECIAL = re.compile(r"[\\*+?{}()\[\]|^$]")  # without these, a pattern takes as long as its text

# Reads [patterns, names]; prints the number of each pattern before it is tried.
_PROGRAM = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]), int(sys.argv[1])))
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
patterns, names = json.load(sys.stdin)
for number, pattern in enumerate(patterns):
    print(number, flush=True)
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        continue  # reported by whoever uses it
    for name in names:
        compiled.match(name)
        compiled.fullmatch(name)
"""


def is_pattern(text: str) -> bool:
    """Return whether a text has characters that make it more than a name when it is used as a regular expression."""
    return _SPECIAL.search(text) is not None


def require_few_pairs(number: int, names: Collection[str], place: object) -> None:
    """Raise ConfigError, naming ``place``, if comparing a number of texts with names would take minutes."""
    if number * len(names) > _MAX_PAIRS:
        raise ConfigError(f"{place} has {number:,} names, too many to compare with {len(names):,} modules; correct it")


def require_quick(patterns: Iterable[str], names: Iterable[str], place: object) -> None:
    """Raise ConfigError, naming ``place``, if a regular expression takes too long or too much memory to compare with names.

    Args:
        patterns: regular expressions as they will be used; those that are none are left to their user.
        names: the texts that they will be compared with.
        place: the file or the setting that has them.
    """
    tried = list(patterns)
    if not tried:
        return
    process = _try(tried, list(names), place)
    if process.returncode == 0:
        return
    begun = process.stdout.split()  # numbers of patterns, up to the one that was not finished
    pattern = tried[int(begun[-1])] if begun else tried[0]
    shown = pattern if len(pattern) <= 80 else pattern[:77] + "..."
    if -process.returncode in (signal.SIGXCPU, signal.SIGKILL):
        failure = f"takes more than {counted(MAX_SECONDS, 'second')}"
    else:
        failure = f"ends the process that tries it, with status {process.returncode}, if it has"
    raise ConfigError(f"{place}: the pattern {shown} {failure} to compare with the names of the model; simplify it")


def _try(patterns: list[str], names: list[str], place: object) -> subprocess.CompletedProcess[str]:
    """Compare patterns with names in another process, and return how it has ended; raise ConfigError if it cannot be started."""
    try:
        return subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, str(MAX_SECONDS), str(_MAX_BYTES)],
            input=json.dumps([patterns, names]), capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(
            f"a process that tries the patterns of {place} cannot be started ({error.strerror})"
        ) from error
