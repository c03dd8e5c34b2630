"""Random sequences of public calls on a streamed and a plain model: python -m tests.seams.fuzz --seconds 600 --seed 0.

Each call is made on the streamed model first. If it is rejected, it is not made on the plain model, and both models
continue unchanged; otherwise both must return the same values. Every divergence is a failure, and so is the rejection
of a call that should work.
"""

import argparse
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from horizon_lm.errors import HorizonError
from tests.seams.compare import difference
from tests.seams.fuzz_calls import CALLS, NEVER_REJECTED
from tests.seams.fuzz_worlds import Setting, World, open_worlds


@dataclass(frozen=True)
class Call:
    """A call: its name in `CALLS`, and the seed of its random choices."""

    name: str
    seed: int

    def __str__(self) -> str:
        return f"{self.name}({self.seed})"


@dataclass(frozen=True)
class Play:
    """A setting of `horizon_lm.stream` and the calls that follow."""

    setting: Setting
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        return f"{self.setting}: {' '.join(map(str, self.calls))}"


class Divergence(Exception):  # noqa: N818
    """Raised if the streamed model behaves differently from the plain model; the message describes the difference."""


def draw(seed: int, length: int = 12, without: Collection[str] = ()) -> Play:
    """Return the sequence of calls for a seed, made of all calls except some."""
    chosen = random.Random(seed)
    setting = Setting.draw(chosen)
    names, weights = zip(*((name, call.weight) for name, call in CALLS.items() if name not in without), strict=True)
    calls = chosen.choices(names, weights, k=length)
    return Play(setting, tuple(Call(name, chosen.randrange(10**6)) for name in calls))


def play(sequence: Play, rejections: Counter[str] | None = None) -> None:
    """Make the calls on both models.

    Raises:
        Divergence: the models differ; the message names the call.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as warnings of foreign writes, which the table of rows checks
        _play(sequence, rejections)


def _play(sequence: Play, rejections: Counter[str] | None) -> None:
    streamed, plain = open_worlds(sequence.setting)
    for number, call in enumerate(sequence.calls):
        try:
            _make(call, streamed, plain, rejections)
            if (
                call.seed % 3 == 0 or number == len(sequence.calls) - 1
            ):  # reading the state would wait for running updates
                _compare(streamed.state(), plain.state(), sequence.setting.tolerance)
                _compare(*(_result(CALLS["evaluate"].make, world, 2) for world in (streamed, plain)), tolerance=2e-5)
        except Divergence as found:
            raise Divergence(f"at call {number + 1}, {call}: {found}") from None
    _end(streamed, plain, sequence.setting.tolerance)


def _make(call: Call, streamed: World, plain: World, rejections: Counter[str] | None) -> None:
    """Make one call on the streamed model, and on the plain model unless it is rejected."""
    kind = CALLS[call.name]
    got = _result(kind.make, streamed, call.seed)
    if isinstance(got, HorizonError):
        if call.name in NEVER_REJECTED and call.name not in streamed.rejects:
            raise Divergence(f"rejected, but should work: {type(got).__name__}: {got}")
        if rejections is not None:
            rejections[f"{call.name}: {type(got).__name__}: {str(got)[:160]}"] += 1
        for world in (streamed, plain):
            world.give_up()
        return
    expected = _result(kind.make, plain, call.seed)
    plain.follow()
    if isinstance(got, Exception) or isinstance(expected, Exception):
        if not (isinstance(got, Exception) and isinstance(expected, Exception)):
            raise Divergence(f"{_words(got)} instead of {_words(expected)}")
        for world in (streamed, plain):
            world.give_up()
        return
    _compare(got, expected, streamed.tolerance)


def _result(make: Any, world: World, seed: int) -> Any:
    torch.manual_seed(seed)
    try:
        return make(world, random.Random(seed))
    except Exception as error:
        return error.with_traceback(None) if isinstance(error, HorizonError) else error


def _words(value: Any) -> str:
    return f"{type(value).__name__} ({value})" if isinstance(value, Exception) else "a result"


def _compare(got: Any, expected: Any, tolerance: float) -> None:
    found = difference(expected, got, tolerance)
    if found:
        raise Divergence(found)


def _end(streamed: World, plain: World, tolerance: float) -> None:
    """Run an ordinary training step after all calls; it must be the same on both models."""
    for name in ("zero_grad", "accumulate", "step", "evaluate"):
        try:
            _make(Call(name, 2), streamed, plain, None)
        except Divergence as found:
            raise Divergence(f"at the end, {name}: {found}") from None
    _compare(streamed.state(), plain.state(), tolerance)


def fails(sequence: Play) -> str | None:
    """Return a description of the failure of a sequence, or None if it succeeds."""
    try:
        play(sequence)
    except Divergence as found:
        return str(found)
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"
    return None


def shrink(sequence: Play) -> Play:
    """Return a shorter sequence that still fails, from which no call can be left out."""
    calls: Sequence[Call] = sequence.calls
    position = 0
    while position < len(calls):
        shorter = Play(sequence.setting, (*calls[:position], *calls[position + 1 :]))
        if fails(shorter):
            calls = shorter.calls
        else:
            position += 1
    return Play(sequence.setting, tuple(calls))


def main() -> int:
    """Play sequences for some time, and print failures and rejected calls."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the first sequence; the next one has the next")
    parser.add_argument("--length", type=int, default=12, help="calls of a sequence")
    parser.add_argument("--without", nargs="*", default=[], choices=list(CALLS), help="calls to leave out")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    start, rejections, calls, failures = time.monotonic(), Counter[str](), 0, 0
    seed = arguments.seed
    while time.monotonic() - start < arguments.seconds and (not failures or arguments.keep_going):
        sequence = draw(seed, arguments.length, arguments.without)
        calls += len(sequence.calls)
        try:
            play(sequence, rejections)
        except Exception:
            failures += 1
            small = shrink(sequence)
            print(f"seed {seed} fails: {small}\n  {fails(small)}", flush=True)
        seed += 1
        if (seed - arguments.seed) % 100 == 0:
            print(f"{seed - arguments.seed} sequences, {calls} calls, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{seed - arguments.seed} sequences, {calls} calls, {failures} failures, {time.monotonic() - start:.0f} s")
    print("rejected:", *(f"{number:6} {text}" for text, number in rejections.most_common()), sep="\n  ")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
