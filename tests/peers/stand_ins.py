"""Names that other projects' tests import and that are not installed here, or are of another version than the tests."""

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import transformers
import transformers.testing_utils

_TRL_SFT = ("_chunked_cross_entropy_loss", "_patch_chunked_ce_lm_head", "dft_loss")  # private in TRL before 1.16


def install() -> None:
    sft = importlib.import_module("trl.trainer.sft_trainer")
    for name in _TRL_SFT:
        if not hasattr(sft, name):
            setattr(sft, name, _skip)
    utils = importlib.import_module("trl.import_utils")
    if not hasattr(utils, "is_joblib_available"):
        utils.is_joblib_available = lambda: False
    for name in ("GlueDataset", "GlueDataTrainingArguments"):  # of transformers 4
        for module in (transformers, sys.modules["transformers"]):  # the lazy module may be another object
            vars(module).setdefault(name, type(name, (), {}))
    for name in (
        "require_sentencepiece",
        "require_tokenizers",
        "require_torch_accelerator",
    ):  # few of the tests that ask for them need them
        setattr(transformers.testing_utils, name, lambda case: case)
    if importlib.util.find_spec("diffusers") is None:  # PEFT's tests of decoders import a module that imports it
        sys.modules["diffusers"] = _AnyName("diffusers")
        sys.modules["diffusers"].__spec__ = ModuleSpec("diffusers", None)


def allow_models_of(module: ModuleType) -> None:
    """Let PEFT's tests open models offline, as if each had been opened before."""
    try:
        utils = importlib.import_module(f"{module.__package__ or 'tests'}.testing_utils")
    except ImportError:
        return
    if hasattr(utils, "_HUB_MODEL_ACCESSES"):
        utils._HUB_MODEL_ACCESSES = _Seen()


class _Seen(dict[str, int]):
    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> int:
        return 1


class _AnyName(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _skip(*_: Any, **__: Any) -> None:
    pytest.skip("a private name of another version")
