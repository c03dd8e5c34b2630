"""Compare the opening of folders with transformers' own: tensors with their dtypes, logits, and what is written again.

A folder has one of four dtypes, and is opened in one of four ways. Each type is tried with each dtype and in each way, and
each dtype in each way with many types. With another version of transformers, the pairs of a type are others.
"""

import json
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import horizon_lm
from horizon_lm.engine.opening.model_opening import OpenRequest, open_model
from horizon_lm.model.files.checkpoint_loader import parameter_names
from horizon_lm.model.files.conversion import find_conversion
from horizon_lm.runs.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from tests.census.comparison import TOLERANCE, Outcome, relative
from tests.census.shrink import of_width
from tests.census.subject import PlainFailsError, Subject, describe
from tests.census.tiny_models import CannotBuildError

Tensors = dict[str, torch.Tensor]

FOLDERS = ("bfloat16", "float16", "float32", "mixed")
OPENINGS = ("float32", "bf16", "fp32_master", "nf4")
# transformers leaves weights of these in float32 and then cannot compute with them in bf16, so here they are not kept so. What is
# written has the folder's dtype.
NOT_COMPUTED_IN_BFLOAT16 = ("xlnet",)
WIDTHS = (40, 48, 64)  # the first one that a type can be built with; the roots of the first two are inexact


def opening_of(model_type: str, folder: str) -> str:
    """Return the way in which a type is opened from a folder of this dtype."""
    version = int(transformers.__version__.split(".")[1])
    return OPENINGS[(zlib.crc32(model_type.encode()) + FOLDERS.index(folder) + version) % len(OPENINGS)]


def opened(subject: Subject, folder: str, opening: str, by_run: bool) -> Outcome:
    """Open the folder of a tiny model, and compare.

    Args:
        subject: the model.
        folder: the dtype that it is saved in.
        opening: the precision; ``nf4`` for `fp32_master` with ``load_in_4bit``.
        by_run: open it as a run does, and once more from a checkpoint; otherwise with `horizon_lm.from_pretrained`.
    """
    with tempfile.TemporaryDirectory() as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        place = Path(temporary)
        model_class = _save(subject, folder, place)
        dtype = torch.float32 if opening == "float32" else torch.bfloat16
        plain, masters = (model_class.from_pretrained(place / "folder", dtype=each) for each in (dtype, torch.float32))
        model = _open(subject, place / "folder", opening, by_run)
        problems = [
            *_buffers(plain, model, model_class.from_pretrained(place / "folder", dtype=dtype)),
            *_parameters(plain, masters, model, opening),
            *_written(plain, model, place, opening),
        ]
        if by_run:
            problems += _resumed(subject, model, place, opening)
        found = _logits(subject, plain, model, place, opening)
    how = f"{folder} as {opening}{' by a run' if by_run else ''}, width {subject.model.config.get_text_config().hidden_size}"
    if problems:
        return Outcome("wrong", f"{how}: {problems[0]} ({len(problems)})")
    return Outcome(found.status, f"{how}: {found.detail}")


def narrow(mapping: str, model_type: str) -> Subject:
    """Return the tiny model of a type, of a width whose root is inexact if the type allows one."""
    for width in WIDTHS:
        subject = Subject(mapping, model_type)
        try:
            with of_width(width):
                subject.plain  # noqa: B018
        except (CannotBuildError, PlainFailsError):
            if width == WIDTHS[-1]:
                raise
        else:
            return subject
    raise AssertionError(WIDTHS)


def _save(subject: Subject, folder: str, place: Path) -> Any:
    """Save the model as transformers publishes one of this dtype, and return its class."""
    model, model_class = subject.copy(), type(subject.model)
    saved = model.state_dict()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer) * 0.1)  # values of a new model would hide what is not read
    try:
        model.save_pretrained(place / "float32")
        dtype = torch.float32 if folder == "mixed" else getattr(torch, folder)
        again = model_class.from_pretrained(place / "float32", dtype=dtype)
        if folder == "mixed":
            halved = {
                each.data_ptr() for each in list(again.parameters())[::2]
            }  # by address, as tied weights have two names
            state = {n: t.bfloat16() if t.data_ptr() in halved else t for n, t in again.state_dict().items()}
            again.save_pretrained(place / "folder", state_dict=state)
        else:
            again.save_pretrained(place / "folder")
    except Exception as error:
        raise PlainFailsError(describe(error)) from error
    return model_class


def _options(opening: str) -> dict[str, Any]:
    four_bits = {"load_in_4bit": True} if opening == "nf4" else {}
    return {
        "precision": "fp32_master" if opening == "nf4" else opening,
        "head": "whole",
        "allow_unproven_model": True,
    } | four_bits


def _open(subject: Subject, folder: Path, opening: str, by_run: bool, **more: Any) -> Any:
    if by_run:
        return open_model(OpenRequest(name=folder, options=_options(opening), **more))
    classifies = subject.mapping == "classification"
    model_class = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    return horizon_lm.from_pretrained(folder, model_class=model_class, **_options(opening))


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return torch.equal(ours, theirs) or bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())


def _buffers(plain: Any, model: Any, again: Any) -> Iterator[str]:
    """Compare all buffers, except those that transformers itself leaves as they happen to be in memory."""
    ours, repeated = dict(model.named_buffers()), dict(again.named_buffers())
    for name, theirs in plain.named_buffers():
        if name not in ours or (_same(repeated[name], theirs) and not _same(ours[name].cpu(), theirs)):
            yield f"the buffer {name} is {_described(ours.get(name))} instead of {_described(theirs)}"


def _described(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else f"{str(tensor.dtype)[6:]} {tensor.flatten()[:2].tolist()}"


def _parameters(plain: Any, masters: Any, model: Any, opening: str) -> Iterator[str]:
    ours, store = dict(model.named_parameters()), model._horizon.engine.store
    exact = dict(masters.named_parameters())
    for name, theirs in plain.named_parameters():
        if name in store.codecs:
            continue
        expected = theirs.data if name in store.in_float32 else theirs.data.to(store.precision.weight_dtype)
        if opening == "fp32_master" and name not in store.in_float32:  # rounds away from zero between two values
            bits = exact[name].data.view(torch.int32)
            expected = ((bits + 0x8000) & -0x10000).view(torch.float32).bfloat16()
            if not torch.equal(store.master(name), exact[name].data):
                yield f"the master of {name} is not the value of the folder"
        if name not in ours or not _same(ours[name].data, expected):
            yield f"the parameter {name} is {_described(ours.get(name))} instead of {_described(expected)}"


def _written(plain: Any, model: Any, place: Path, opening: str) -> Iterator[str]:
    """Compare what is written with the folder, in the dtypes that are promised."""
    plain.save_pretrained(place / "plain")
    model.save_pretrained(place / "written")
    theirs, ours, source = (_read(place / name) for name in ("plain", "written", "folder"))
    tied = parameter_names(plain)
    if {tied.get(name, name) for name in theirs} != {tied.get(name, name) for name in ours}:
        yield f"written are also {sorted(ours.keys() ^ theirs.keys())[:2]}, or instead"
        return
    store = model._horizon.engine.store
    own = {name for name, _ in plain.named_buffers()}
    conversion = find_conversion(plain, ours)  # modules may have other names in files
    buffers = {name for target in conversion.targets if target.name in own for name in target.sources}
    exact = buffers | {n for target in conversion.targets if target.name in store.in_float32 for n in target.sources}
    ours = {
        name: each for name, each in ours.items() if name in theirs
    }  # a tied weight may have been written by its other name
    for name, each in ours.items():
        in_float32 = theirs[name].dtype == torch.float32 and plain.config.model_type not in NOT_COMPUTED_IN_BFLOAT16
        kept = each.is_floating_point() and (opening == "float32" or in_float32)
        expected = source[name].float() if kept else source[name]
        if opening in ("bf16", "nf4") and name not in exact and each.is_floating_point():
            expected = expected.bfloat16().to(expected.dtype)  # its store has no more
        if each.dtype != expected.dtype:
            yield f"{name} is written as {each.dtype} instead of {expected.dtype}"
        elif not (opening == "nf4" and (store.codecs and each.ndim > 1)) and not _same(each, expected):
            yield f"{name} is written as {_described(each)} instead of {_described(expected)}"
    config = json.loads((place / "written/config.json").read_text(encoding="utf-8"))
    if opening == "float32" and config.get("dtype") != "float32":
        yield f"the written config says {config.get('dtype')}"


def _read(folder: Path) -> Tensors:
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


def _resumed(subject: Subject, model: Any, place: Path, opening: str) -> Iterator[str]:
    """Compare the buffers of a model whose weights come from a checkpoint. One with quantized weights reads its folder."""
    if opening == "nf4":
        return
    save_checkpoint(place / "checkpoint", model)
    resumed = _open(subject, place / "folder", opening, by_run=True, reads_weights=False)
    load_checkpoint(place / "checkpoint", resumed)
    theirs = dict(model.named_buffers())
    for name, each in resumed.named_buffers():
        if not _same(each, theirs[name]):
            yield f"resumed, the buffer {name} is {_described(each)} instead of {_described(theirs[name])}"


def _logits(subject: Subject, plain: Any, model: Any, place: Path, opening: str) -> Outcome:
    """Compare logits in float32 with the weights that the streamed model has, all of which are compared elsewhere."""
    if opening == "nf4":  # the decoded weights
        decoded = type(plain).from_pretrained(place / "written", dtype=torch.float32)
        values = {name: each.data for name, each in decoded.named_parameters()}
    else:
        values = {name: each.data.float() for name, each in model.named_parameters()}
    for name, parameter in plain.float().named_parameters():
        parameter.data = values[name]
    batch = {name: each for name, each in subject.batch().items() if name != "labels"}
    results = []
    for each in (plain.eval(), model.eval()):
        torch.manual_seed(7)
        with torch.no_grad():
            try:
                results.append(each(**batch, **({"use_cache": False} if each is plain else {})).logits)
            except Exception as error:
                if each is plain:
                    raise PlainFailsError(describe(error)) from error
                raise
    theirs, ours = results
    if torch.equal(ours, theirs):
        return Outcome("right", "bit for bit")
    off = relative(ours, theirs)
    return Outcome("close" if off <= TOLERANCE else "wrong", f"logits {off:.1e}")


def _case(folder: str, subject: Subject) -> Outcome:
    by_run = subject.mapping == "causal" and FOLDERS.index(folder) % 2 == 1  # a run trains no classifier
    return opened(
        _narrowed(subject.mapping, subject.model_type), folder, opening_of(subject.model_type, folder), by_run
    )


_narrowed = lru_cache(maxsize=1)(narrow)
OPENED: dict[str, Callable[[Subject], Outcome]] = {f"opened_{folder}": partial(_case, folder) for folder in FOLDERS}
