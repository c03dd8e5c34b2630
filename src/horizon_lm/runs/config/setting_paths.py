"""Find settings that name a file or a folder which does not exist, before anything is loaded."""

from collections.abc import Iterator
from pathlib import Path

from horizon_lm.common.constants import LANGUAGE_MODEL
from horizon_lm.common.gguf_header import read_gguf_header
from horizon_lm.common.paths import exists, may_be_on_hub, near_path, require_inside
from horizon_lm.errors import ConfigError
from horizon_lm.runs.config.datasets import DatasetConfig
from horizon_lm.runs.config.run import RunConfig

Problem = tuple[tuple[int | str, ...], str, str]  # the place of a setting, its value, and what is wrong with it


def path_problems(run: RunConfig) -> Iterator[Problem]:
    """Yield a `Problem` for each setting whose path does not exist or is of another kind.

    A name that may be on the hub is no problem. The ``path`` of an entry of ``datasets`` is checked when the entry is validated.
    """
    yield from _model_problems(run)
    for name, value, kind in (
        ("chat_template_path", run.chat_template_path, "file or folder"),
        ("adapter_name_or_path", run.adapter_name_or_path, "folder"),
    ):
        if value is not None and not exists(value) and not may_be_on_hub(value):
            yield (name,), value, f"no such {kind}{near_path(value)}"
    checkpoint = run.resume_from_checkpoint
    if isinstance(checkpoint, str) and checkpoint != "auto" and not exists(checkpoint):
        yield ("resume_from_checkpoint",), checkpoint, f"no such folder{near_path(checkpoint)}"
    for setting, entries in (("datasets", run.datasets), ("eval_datasets", run.eval_datasets)):
        for index, entry in enumerate(entries or ()):
            yield from _problems_in_folder((setting, index), entry)


def _model_problems(run: RunConfig) -> Iterator[Problem]:
    """Yield the problem of the model's folder or, if there is none, of the GGUF file in it."""
    name, file = run.model_name_or_path, run.gguf_file
    if not exists(name):
        if not may_be_on_hub(name.removesuffix(LANGUAGE_MODEL)):
            yield ("model_name_or_path",), name, f"no such folder{near_path(name)}"
        return
    folder = Path(name).expanduser()
    if not folder.is_dir():
        remedy = (
            f"name its folder, and set gguf_file: {folder.name}"
            if folder.suffix == ".gguf"
            else "name the folder of a model"
        )
        yield ("model_name_or_path",), name, f"is a file; {remedy}"
    elif file is not None and not exists(str(folder / file)):
        yield ("gguf_file",), file, f"no such file{near_path(file, folder)}"
    elif file is not None:
        try:
            require_inside(folder / file, folder)
            read_gguf_header(folder / file)
        except ConfigError as error:
            yield ("gguf_file",), file, str(error).removeprefix("gguf_file: ").removeprefix(f"{folder / file} ")


def _problems_in_folder(place: tuple[int | str, ...], entry: DatasetConfig) -> Iterator[Problem]:
    """Yield the problems of an entry's ``data_dir`` and ``data_files`` in a local folder. Wildcards are looked up when rows are read."""
    folder = Path(entry.path).expanduser()
    if not folder.is_dir():
        return
    if entry.data_dir is not None:
        if not exists(str(folder / entry.data_dir)):
            yield (*place, "data_dir"), entry.data_dir, f"no such folder{near_path(entry.data_dir, folder)}"
            return
        folder /= entry.data_dir
    for file in entry.data_files or ():
        if not set(file) & set("*?[") and "://" not in file and not exists(str(folder / file)):
            yield (*place, "data_files"), file, f"no such file{near_path(file, folder)}"
