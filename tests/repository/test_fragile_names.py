"""Undocumented names of other packages that we use: each name is listed in docs/generated/fragile-names.md and still exists."""

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "horizon_lm"
PAGE = ROOT / "docs" / "generated" / "fragile-names.md"
FOREIGN = ("torch", "numba", "transformers", "trl", "datasets", "accelerate", "lm_eval", "huggingface_hub")
DOCUMENTED = (  # modules whose public names are documented; of other modules only the names exported by the package
    "numba.extending", "torch.autograd", "torch.backends", "torch.distributed", "torch.nn", "torch.nn.attention", "torch.nn.functional", "torch.overrides",
    "torch.utils.checkpoint", "torch.utils.tensorboard", "datasets.utils.logging", "huggingface_hub.constants", "huggingface_hub.errors",
)  # fmt: skip
NOT_FOREIGN = (
    "._asdict",
    "._fields",
    "._exit",
    "._run_exitfuncs",
    "._shutdown",
    "._horizon",
    "._chunk_tokens",
)  # the standard library's; what we give foreign objects

Use = tuple[str, str]  # name and file; a name that begins with a dot is an attribute of a foreign object


def listed() -> dict[str, list[str]]:
    """Return the names in the table of the page, and the files that use them."""
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {name.strip(" `"): re.findall(r"`([^`]+)`", files) for _, name, files, *_ in rows}


def uses_in(code: str, file: str) -> set[Use]:
    """Return the foreign names in one of our modules that are private, deep inside a package, or replaced."""
    tree = ast.parse(code)
    imported = {local: (module, name) for node in ast.walk(tree) for module, name, local in _imports(node)}
    own = {name for node in ast.walk(tree) for name in _defined(node)}
    found = {_full(*each) for each in imported.values() if _is_fragile(*each)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, *rest = _chain(node)
            if owner in imported:
                name = _full(*imported[owner], *rest)
                found |= {name} if _has_private(name) or isinstance(node.ctx, ast.Store) else set()
            elif _is_private(node.attr) and (node.attr not in own or ast.unparse(node.value) == "super()"):
                found.add(f".{node.attr}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            found |= {f".{name}"} if _is_private(name) and name not in own else set()
    return {(name, file) for name in found if name not in NOT_FOREIGN}


def _imports(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yield module, name and local name of everything imported from a foreign package."""
    if isinstance(node, ast.Import):
        names = [(alias.name if alias.asname else alias.name.split(".")[0], alias.asname) for alias in node.names]
        each = [(name, "", local or name) for name, local in names]
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        each = [(node.module, alias.name, alias.asname or alias.name) for alias in node.names]
    else:
        each = []
    return (found for found in each if found[0].split(".")[0] in FOREIGN)


def _full(*parts: str) -> str:
    return ".".join(filter(None, parts))


def _chain(node: ast.expr) -> list[str]:
    """Return all names of `a.b.c`; for an attribute of another expression, an unknown object and the attribute."""
    if isinstance(node, ast.Attribute):
        return [*_chain(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def _is_fragile(module: str, name: str) -> bool:
    return _has_private(_full(module, name)) or bool("." in module and module not in DOCUMENTED and name)


def _has_private(name: str) -> bool:
    return any(map(_is_private, name.split(".")))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def _defined(node: ast.AST) -> list[str]:
    """Return the private names that a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) in ("self", "cls")
    ):
        return [node.attr]
    return []


def is_there(name: str) -> bool:
    """Return whether an attribute of a class or of its objects can be found by its full name."""
    parts = name.split(".")
    owner: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if hasattr(owner, part):
            owner = getattr(owner, part)
        elif isinstance(owner, type):
            return _objects_have(owner, part)
        elif inspect.ismodule(owner) and importlib.util.find_spec(".".join(parts[:i])):
            owner = importlib.import_module(".".join(parts[:i]))
        else:
            return False
    return True


def _objects_have(cls: type, name: str) -> bool:
    return any(
        name in inspect.get_annotations(each) or f".{name} = " in inspect.getsource(each)
        for each in cls.__mro__
        if each.__module__.split(".")[0] in FOREIGN
    )


def _is_of(name: str, row: str) -> bool:
    """Return whether a used name is the name in a row, or inside it."""
    return row.endswith(name) if name.startswith(".") else f"{name}.".startswith(f"{row}.")


USED = sorted(
    {use for path in SOURCE.rglob("*.py") for use in uses_in(path.read_text(), path.relative_to(SOURCE).as_posix())}
)


@pytest.mark.filterwarnings("ignore:You are importing from .trl.experimental.")
@pytest.mark.parametrize("name", sorted({*listed(), *(name for name, _ in USED if not name.startswith("."))}))
def test_a_name_is_still_there(name: str) -> None:
    pytest.importorskip(name.split(".")[0], reason="not installed")
    assert is_there(name), f"{name} has moved: see docs/generated/fragile-names.md for what it is used for, and where"


def test_every_use_is_listed() -> None:
    rows = [(row, file) for row, files in listed().items() for file in files]
    missing = [
        use for use in USED
        if not any(use[1] == file and (_is_of(use[0], row) or row.startswith(f"{use[0]}.")) for row, file in rows)
    ]  # fmt: skip
    assert not missing, f"add to docs/generated/fragile-names.md, or do without: {missing}"


def _replaces(row: str, file: str) -> bool:
    """Return whether a file replaces a name by its text, or overrides it."""
    name, source = row.rpartition(".")[2], (SOURCE / file).read_text()
    return f'"{name}"' in source or f"    def {name}(" in source


def test_every_listed_name_is_used() -> None:
    rows = [(row, file) for row, files in listed().items() for file in files]
    stale = [
        each for each in rows
        if not any(each[1] == file and _is_of(name, each[0]) for name, file in USED) and not _replaces(*each)
    ]  # fmt: skip
    assert not stale, f"remove from docs/generated/fragile-names.md: {stale}"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from transformers.utils.deep import thing", "transformers.utils.deep.thing"),
        ("from transformers import thing", None),
        ("from torch.utils import _pytree as tree\ntree.tree_map(1)", "torch.utils._pytree.tree_map"),
        ("import torch\ntorch._C._nn.parse()", "torch._C._nn.parse"),
        ("import torch.utils.data\ntorch._C._nn.parse()", "torch._C._nn.parse"),
        ("import torch\ntorch.zeros(1)", None),
        ("from trl import data_utils as d\nd.pack = None", "trl.data_utils.pack"),
        ("def f(model): return model._modules", "._modules"),
        ("def f(model): return getattr(model, '_modules', None)", "._modules"),
        ("class A:\n def f(self): self._modules = {}; return self._modules", None),
        ("class A:\n def _wrap(self): return super()._wrap()", "._wrap"),
    ],
)
def test_uses_are_found(code: str, expected: str | None) -> None:
    names = {name for name, _ in uses_in(code, "here.py")}
    assert expected in names if expected else not names


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("torch.nn.Module._parameters", True),
        ("torch.nn.Module._not_there", False),
        ("torch.utils._pytree.tree_map", True),
        ("transformers.not_there.thing", False),
    ],
)
def test_a_name_that_moved_is_detected(name: str, there: bool) -> None:
    assert is_there(name) == there
