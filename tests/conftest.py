"""Fixtures and options of all tests."""

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Processes that tests start compute with all cores, beside other tests: their threads shall not wait busily for each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
import transformers

from horizon_lm.planning.measure import block_probe, model_outline
from horizon_lm.planning.measure.cache_probe import CacheProbe
from tests.support import remembered

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell without job control has put pytest into the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # with tiny models, more threads only compete
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
# torch.manual_seed formats the stack four times for devices that are not there, a millisecond each time.
for device in (torch.cuda, torch.xpu, torch.mtia):
    device.traceback = SimpleNamespace(format_stack=list)


@pytest.fixture(autouse=True, scope="session")
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Use empty folders, because profiles and caches on this machine would change plans, or be changed."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))
    workers = tmp_path_factory.getbasetemp()
    os.environ["NUMBA_CACHE_DIR"] = str(workers.parent if "PYTEST_XDIST_WORKER" in os.environ else workers)
    cache = tmp_path_factory.mktemp("datasets")
    os.environ["HF_DATASETS_CACHE"] = str(cache)
    if importlib.util.find_spec("datasets"):  # the engine and its tests run without it
        import datasets

        datasets.config.HF_DATASETS_CACHE = cache


@pytest.fixture(autouse=True, scope="session")
def written() -> Iterator[Callable[..., frozenset[str]]]:
    """Try once in this process what equal blocks of streamed models write.

    Yields:
        The function that tries it.
    """
    find = block_probe._written
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_probe, "_written", remembered.remember_written(find))
        yield find


@pytest.fixture(autouse=True, scope="session")
def outlines() -> Iterator[Callable[..., Any]]:
    """Outline a model once for all runs and trainers in this process.

    Yields:
        The function that outlines a model, for tests that change it.
    """
    outline_model = model_outline.outline_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_outline, "outline_model", remembered.remember(outline_model))
        yield outline_model


@pytest.fixture(autouse=True, scope="session")
def cache_sizes() -> Iterator[None]:
    """Measure the key-value cache of a model once for all runs in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheProbe, "cache_bytes", remembered.remember_cache_bytes(CacheProbe.cache_bytes))
        yield


@pytest.fixture(autouse=True, scope="session")
def unsynced_files() -> Iterator[None]:
    """Leave files to the system's cache: no test cuts the power, and waiting for disks takes some percent of the time."""

    def require_open(file: Any) -> None:
        os.fstat(file if isinstance(file, int) else file.fileno())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", require_open)
        yield


@pytest.fixture
def whole_installation() -> None:
    """Skip a test if only the dependencies of the engine are installed."""
    for package in ("pydantic", "datasets", "trl"):
        pytest.importorskip(package, reason="needs the whole installation")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    _freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    if len(sys.modules) > _num_modules:
        _freeze()


_num_modules = 0


def _freeze() -> None:
    """Exclude what imports have created from garbage collection, because each plan collects garbage."""
    global _num_modules
    _num_modules = len(sys.modules)
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what is left when the interpreter ends is a leak to triton's nanobind


def pytest_addoption(parser: pytest.Parser) -> None:
    if not importlib.util.find_spec("pytest_timeout"):  # unknown to pytest without the plugin
        parser.addini("timeout", "seconds that a test may take, where pytest-timeout is installed")
    parser.addoption(
        "--device", default="cuda", choices=["cuda", "cpu"], help="for tests marked gpu; cpu tries the tests"
    )
