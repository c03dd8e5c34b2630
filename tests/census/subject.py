"""A tiny model with reference results of plain Hugging Face, and the outcomes of exceptions."""

import copy
import re
import traceback
import warnings
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any, Self

import torch

import horizon_lm
from horizon_lm.errors import ConfigError, ModelNotSupportedError
from horizon_lm.model.components import Component, component_of_params
from tests.census.comparison import Outcome, Step, same_step, train_step
from tests.census.images import Images, find_images
from tests.census.inputs import text_batch
from tests.census.tiny_models import CannotBuildError, build

Counts = tuple[int, ...]  # the number of images of each row
REJECTIONS = (ConfigError, ModelNotSupportedError)  # other errors are raised too late, or do not concern the model


class NoSuchCaseError(Exception):
    """Raised if a case does not apply to a model type; the message is the reason."""


class PlainFailsError(Exception):
    """Raised if plain Hugging Face fails where a case needs its result."""


class Subject:
    """The tiny model of a model type, and reference results of plain Hugging Face."""

    def __init__(self, mapping: str, model_type: str, overrides: dict[str, Any] | None = None) -> None:
        self.mapping, self.model_type, self.overrides = mapping, model_type, overrides or {}
        self._plain: dict[Counts, Step] = {}

    @cached_property
    def model(self) -> Any:
        """The plain model; cases take copies of it."""
        return build(self.model_type, self.mapping, **self.overrides)

    def copy(self) -> Any:
        return copy.deepcopy(self.model)

    def stream(self, **settings: Any) -> Any:
        """Stream a copy of the model, proven or not, because the table of proven models is made from the outcomes."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", horizon_lm.UnprovenModelWarning)
            warnings.simplefilter("ignore", horizon_lm.HeadWarning)
            settings = {"precision": "float32", "allow_unproven_model": True} | settings
            return horizon_lm.stream(self.copy(), **settings)

    def batch(self, seed: int = 1, **options: Any) -> dict[str, torch.Tensor]:
        batch = text_batch(self.model_type, seed=seed, **options)
        if self.mapping == "classification":
            batch["labels"] = batch["input_ids"][:, 0] % self.model.config.num_labels  # (B,)
        if self.mapping == "tokens":
            batch["labels"] = batch["labels"].where(batch["labels"] < 0, batch["labels"] % self.model.config.num_labels)
        return batch

    @cached_property
    def images(self) -> Images:
        """How the model takes images."""
        return find_images(self.model)

    def rows(self, counts: Counts) -> dict[str, torch.Tensor]:
        """Return rows with so many images each; rows of text for an empty tuple."""
        return self.images.batch(counts) if counts else self.batch()

    @property
    def plain(self) -> Step:
        """A training step of the plain model on text; raises as `plain_on`."""
        return self.plain_on(())

    def plain_on(self, counts: Counts) -> Step:
        """Return a training step of the plain model on such rows. Raise PlainFailsError if it fails, or differs when repeated."""
        if counts not in self._plain:
            self._plain[counts] = self._plain_step(self.rows(counts))
        return self._plain[counts]

    def with_frozen(self, frozen: Collection[Component]) -> Self:
        """Return a subject whose model has frozen components. Raise NoSuchCaseError if the model has no vision tower."""
        components = component_of_params(self.model)
        if Component.VISION_TOWER not in components.values():
            raise NoSuchCaseError("it has no vision tower")
        other = type(self)(self.mapping, self.model_type, self.overrides)
        other.model = self.copy()
        for name, param in other.model.named_parameters():
            param.requires_grad_(components[name] not in frozen)
        return other

    def _plain_step(self, batch: dict[str, torch.Tensor]) -> Step:
        try:
            first, second = (train_step(self.copy(), batch, use_cache=False) for _ in range(2))
        except Exception as error:
            raise PlainFailsError(describe(error)) from error
        if not same_step(first, second):
            raise PlainFailsError("plain Hugging Face is not deterministic")
        if not first.loss.isfinite():
            raise PlainFailsError(f"the loss is {first.loss.item()}")
        return first


def attempt(case: Callable[[Subject], Outcome], subject: Subject) -> Outcome:
    """Run a case and return its outcome, including any exception."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return case(subject)
    except NoSuchCaseError as error:
        return Outcome("no_such_case", str(error))
    except CannotBuildError as error:
        return Outcome("cannot_build", str(error))
    except PlainFailsError as error:
        return _without_plain(subject, error)
    except REJECTIONS as error:
        return Outcome("rejected", f"{type(error).__name__}: {first_sentence(error)}")
    except Exception as error:
        return Outcome("crashed", describe(error))


def _without_plain(subject: Subject, error: Exception) -> Outcome:
    """Return the outcome of a case without a reference, which is a rejection if the model is rejected."""
    try:
        subject.stream(head="whole")
    except CannotBuildError as failure:
        return Outcome("cannot_build", str(failure))
    except REJECTIONS as rejection:
        return Outcome("rejected", f"{type(rejection).__name__}: {first_sentence(rejection)}")
    except Exception as crash:
        return Outcome("crashed", describe(crash))
    return Outcome("plain_fails", str(error))


def first_sentence(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]


def describe(error: BaseException) -> str:
    """Describe an exception, including the last places in transformers and Horizon-LM that it passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    places = []
    for package in ("transformers", "horizon_lm"):
        inside = [f for f in frames if f"/{package}/" in f.filename]
        if inside:
            name = re.sub(rf".*/{package}/", f"{package}/", inside[-1].filename)
            places.append(f"{name}:{inside[-1].lineno}")
    return f"{type(error).__name__}: {first_sentence(error)[:300]} [{', '.join(places)}]"
