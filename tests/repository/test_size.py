"""The size of the package, each number at most its bound. A bound is raised in a commit of its own, which says what for.

Size is counted in syntax nodes: lines would reward code that is packed into few of them.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "horizon_lm"
BOUNDS = {
    "syntax nodes": 481_000,
    "files": 481,
    "floors of imports": 12,
    "entries at the root": 14,
    "nodes in 100 lines of code": 1_100,
    "lines for 100 lines of code": 160,
}
_ROOM = 0.02  # by which a number may be below its bound: a bound follows what gets smaller
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


@cache
def sizes() -> dict[str, int]:
    """Return each size of the package by its name in `BOUNDS`."""
    texts = [path.read_text() for path in SOURCE.rglob("*.py")]
    nodes = sum(sum(1 for _ in ast.walk(ast.parse(text))) for text in texts)
    lines, code = sum(text.count("\n") for text in texts), sum(len(set(lines_of_code(text))) for text in texts)
    entries = [
        path for path in SOURCE.iterdir() if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__")
    ]
    return {
        "syntax nodes": nodes,
        "files": len(texts),
        "floors of imports": floors(imports_of_entries()),
        "entries at the root": sum(not path.name.startswith("__") for path in entries),
        "nodes in 100 lines of code": round(100 * nodes / code),
        "lines for 100 lines of code": round(100 * lines / code),
    }


def lines_of_code(text: str) -> Iterator[int]:
    """Yield the numbers of the lines that have code, no docstrings, and no comments alone."""
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
    }
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE and token.start not in docstrings:
            yield from range(token.start[0], token.end[0] + 1)


def imports_of_entries() -> dict[str, set[str]]:
    """Return for each package and file at the root those that it imports."""
    graph, root = grimp.build_graph("horizon_lm"), "horizon_lm."
    found: dict[str, set[str]] = {}
    for module in graph.modules:
        if module.startswith(root):
            entry = module.split(".")[1]
            imported = {
                each.split(".")[1] for each in graph.find_modules_directly_imported_by(module) if each.startswith(root)
            }
            found.setdefault(entry, set()).update(imported - {entry})
    return found


def floors(imports: dict[str, set[str]]) -> int:
    """Return the number of entries on the longest chain of imports."""

    @cache
    def height(entry: str) -> int:
        return 1 + max(map(height, imports[entry]), default=0)

    return max(map(height, imports))


@pytest.mark.parametrize("name", BOUNDS)
def test_size(name: str) -> None:
    size, bound = sizes()[name], BOUNDS[name]
    assert size <= bound, f"{name}: {size:,}, more than the bound of {bound:,}; do with less, or raise it and say why"
    assert size >= (1 - _ROOM) * bound, f"{name}: {size:,}, and the bound is {bound:,}; lower it"


def test_lines_of_code() -> None:
    """The control: docstrings, comments and empty lines are none, and a string over several lines is."""
    text = '"""Text.\n\nMore."""\n\n# comment\nx = 1  # comment\n\n\ndef f():\n    """Text."""\n    return """a\nb"""\n'
    assert sorted(set(lines_of_code(text))) == [6, 9, 11, 12]


def test_floors() -> None:
    assert floors({"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"c"}}) == 3
