"""Leave most cases of a long parametrised test to ``-m slow``."""

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def thinned(params: Iterable[Any], every: int = 3, keep: Collection[Any] = ()) -> list[Any]:
    """Return all params, of which only some run by default; the others are marked ``slow``.

    For a product of parameters, ``every`` should have no common divisor with the lengths of the inner ones, so that all
    their values remain among the default cases.

    Args:
        params: params of `pytest.mark.parametrize`; a tuple has the values of several arguments.
        every: the first case and every ``every``-th one after it run by default.
        keep: further params that run by default.
    """
    cases = list(params)
    if unknown := [each for each in keep if each not in cases]:
        raise ValueError(f"keep names cases that do not exist: {unknown}")
    return [case if number % every == 0 or case in keep else _slow(case) for number, case in enumerate(cases)]


def without(params: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """Return all params, of which those in ``slow`` are marked ``slow``, because other cases have all that they have."""
    cases = list(params)
    if unknown := [each for each in slow if each not in cases]:
        raise ValueError(f"slow names cases that do not exist: {unknown}")
    return [_slow(case) if case in slow else case for case in cases]


def covering(*lists: Iterable[Any]) -> list[Any]:
    """Return the product of some lists, of which each value is in a case that runs by default; all other cases are marked ``slow``.

    The longest list decides how many run by default: each of its values is in one of them, with those of the others in turn.
    """
    values = [list(each) for each in lists]
    cases = itertools.product(*(range(len(each)) for each in values))
    default = {tuple(number % len(each) for each in values) for number in range(max(map(len, values)))}
    named = {numbers: tuple(each[number] for each, number in zip(values, numbers, strict=True)) for numbers in cases}
    return [case if numbers in default else _slow(case) for numbers, case in named.items()]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
