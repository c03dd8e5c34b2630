"""Helpers shared by the commands: turning errors into messages and exit codes, and opening a model with its tokenizer."""

import errno
import functools
import gc
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

import horizon_lm
from horizon_lm.common.gguf_header import read_gguf_header
from horizon_lm.common.near_misses import closest_setting
from horizon_lm.common.paths import exists
from horizon_lm.common.quantities import parse_size
from horizon_lm.common.resources import threads_left, usable_cores
from horizon_lm.common.run_folders import require_model_folder
from horizon_lm.common.signals import arrived_signal
from horizon_lm.common.visible import fitted
from horizon_lm.errors import ConfigError, HorizonError, InterruptedRunError

P = ParamSpec("P")
R = TypeVar("R")

# Options that several commands have.
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DeviceMemory = Annotated[str | None, typer.Option(help="Limit of the engine's device buffers, such as 300MiB.")]
Precision = Annotated[str, typer.Option(help="Precision of the weights in host memory: bf16, fp32_master, float32.")]
RemoteCode = Annotated[bool, typer.Option(help="Run Python code shipped with the model.")]
Model = Annotated[str | None, typer.Option(help="A folder, hub id or known model; overrides the run file.")]
Base = Annotated[
    str | None,
    typer.Option("--base", help="With a folder of adapters, their base. Default: the one that the adapters name."),
]
GgufFile = Annotated[str | None, typer.Option(help="A GGUF file in the folder to read the weights from.")]
Unproven = Annotated[bool, typer.Option(help="Open a model whose type was not compared with plain autograd.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist.")]
ShardSize = Annotated[str, typer.Option(help="Largest size of a file.")]
DTYPES = ("bfloat16", "float16", "float32")  # of models that are written


def exits(command: Callable[P, R]) -> Callable[P, R]:
    """Decorate a command to print a HorizonError to standard error and exit with its code; any other exception is a bug."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except InterruptedRunError as end:  # what was asked for, and no error
            if not end.is_reported:
                _print_line(str(end))
            raise typer.Exit(end.exit_code) from None
        except HorizonError as error:
            if not error.is_reported:
                _print_error(str(error))
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise _interrupted() from None
        except Exception as error:
            if arrived_signal():  # other code may replace KeyboardInterrupt by an error, as numpy does on import
                raise _interrupted() from None
            if not isinstance(error, OSError) or error.errno != errno.ENAMETOOLONG:
                raise
            name = str(error.filename)
            _print_error(f"{name[:60]}...: a path of {len(name):,} characters is too long; use a shorter one")
            raise typer.Exit(ConfigError.exit_code) from None

    return run


def _interrupted() -> typer.Exit:
    """Print that the command was interrupted, and by which signal; return the exit."""
    name = arrived_signal()
    _print_line(f"interrupted{f' by {name}' if name else ''}; files written before are intact")
    return typer.Exit(InterruptedRunError.exit_code)


def require_texts(arguments: Iterable[str]) -> None:
    """Raise ConfigError if an argument has a null character, which no path can have."""
    for each in arguments:
        if "\0" in each:
            raise ConfigError(f"{each[:60]!r} has a null character; remove it")


def require_options(command: str, arguments: Sequence[str], options: Iterable[str]) -> None:
    """Raise ConfigError if an argument is neither a setting of runs nor an option of the command, but similar to an option,
    or the option by which other trainers take a run file.
    """
    from horizon_lm.runs.config.foreign.tables import remedies
    from horizon_lm.runs.config.run import SCHEMAS

    own_options = {option.removeprefix("--").replace("-", "_"): option for option in options}
    settings = {name for schema in SCHEMAS.values() for name in schema.model_fields}
    known = own_options.keys() | settings | remedies().keys()  # names of other trainers have other messages
    # The placeholder stands for the value of an option that comes last.
    for each, following in pairwise((*arguments, "RUN.yaml")):
        name, equals, value = each.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if each.startswith("--") and name in ("config", "config_file"):
            file = shlex.quote(value if equals else following)
            raise ConfigError(f"--{name} is not an option; write horizon-lm {command} {file}")
        if each.startswith("--") and name not in known and (close := closest_setting(name, own_options)):
            raise ConfigError(f"--{name} is neither an option nor a setting; did you mean {own_options[close]}?")


def _print_error(text: str) -> None:
    _print_line(f"error: {text}")


def _print_line(text: str) -> None:
    with suppress(OSError, ValueError):  # a closed terminal must not change the exit code
        print(fitted(text, sys.stderr), file=sys.stderr, flush=True)


def require_threads() -> None:
    """Raise ConfigError if this process may not start the threads that its libraries need: some of them would abort."""
    needed, room = 8 + 4 * usable_cores(), threads_left()
    if room is None:
        return
    left, limit = room
    if left < needed:
        raise ConfigError(
            f"only {left} more threads or processes may be started, but about {needed} are needed; raise {limit}"
        )


def run_argument(help: str, metavar: str = "RUN.yaml [--key value]") -> Any:
    """Return the argument of a command that takes a run file and settings."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def run_arguments(tokens: Iterable[str] | None, **options: str | None) -> tuple[str | None, list[str]]:
    """Return the run file, if any, and the overrides, among them the options of the command that are set.

    Raises:
        ConfigError: the argument in the place of the run file is no file, and not named like one.
    """
    from horizon_lm.runs.config.load import split_arguments

    path, overrides = split_arguments(list(tokens or ()))
    if path is not None and not path.endswith((".yaml", ".yml")) and (Path(path).is_dir() or not exists(path)):
        raise ConfigError(f"{path} is no run file; if it is a model, write --model {path}")
    for key, value in options.items():
        if value is not None:
            overrides += [f"--{key.replace('_', '-')}", value]
    return path, overrides


def read_size(option: str, text: str) -> int:
    """Return the bytes of a size that an option has; raise ConfigError, naming the option, if it is none or lacks a unit."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {text!r}: {str(error).removeprefix(f'{text!r} ')}") from error


def require_written(dtype: str | None, max_shard_size: str, *, remedy: str = "") -> None:
    """Raise ConfigError for a dtype that cannot be written, or an invalid file size. ``remedy``: ends the message about the dtype."""
    read_size("--max-shard-size", max_shard_size)
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}{remedy}")


def print_written(model: Path, *, options: str = "") -> None:
    """Print where a model, a folder or a file in one, was written, and the command that tries it, which ends with ``options``."""
    folder = model.parent if model.is_file() else model
    print(f'The model is in {model}. Try it:\n  horizon-lm generate {shlex.quote(str(folder))} "..."{options}')


def require_gguf(name: str, base: str | None, gguf_file: str | None) -> None:
    """Raise ConfigError if a GGUF file is named in place of its folder, or is missing there or damaged, before anything is imported
    that takes seconds.
    """
    from horizon_lm.model.folder import gguf_path

    if not exists(base or name):
        return
    path = Path(base or name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        raise ConfigError(
            f"{path} is a file; write {shlex.quote(str(path.parent))} --gguf-file {shlex.quote(path.name)}"
        )
    if gguf_file is not None:
        read_gguf_header(gguf_path(path, gguf_file))


def find_model(
    name: str, base: str | None, device: str, device_memory: int | None, precision: str, gguf_file: str | None,
    trust_remote_code: bool, allow_unproven_model: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Find a model by name: return the request to open it, and its tokenizer. No weights are read. The arguments have the names of the
    commands' options.

    Raises:
        ConfigError: ``name`` or ``base`` is not found or no model, or there is no such device or no tokenizer.
    """
    from horizon_lm.engine.opening.model_opening import OpenRequest
    from horizon_lm.model.adapters import Adapters
    from horizon_lm.model.hub import local_folder
    from horizon_lm.runs.data.tokenizer_opening import open_tokenizer
    from horizon_lm.runs.training.setup import choose_device

    if exists(name):
        require_model_folder(Path(name).expanduser())
    try:
        folder: Path = local_folder(name)
    except ConfigError as error:
        # `~` is expanded only in a path: `expanduser` fails for a user that does not exist.
        parent = (Path(name).expanduser() if exists(name) else Path(name)).parent
        # NAME is OUTPUT_DIR/model of a run that has not ended.
        is_of_run = exists(str(parent / "metrics.jsonl")) and not exists(str(parent / "model"))
        hint = f"; the run in {parent} has not exported its model yet" if is_of_run else ""
        raise ConfigError(f"{error}{hint}") from error
    base_folder = find_base(base)
    request = OpenRequest(
        name=base_folder or folder,
        gguf_file=gguf_file,
        trust_remote_code=trust_remote_code,
        adapters=Adapters(folder=str(folder)) if base_folder else None,
        options={
            "device": choose_device(device),
            "precision": precision,
            "device_memory": device_memory,
            "allow_unproven_model": allow_unproven_model,
        },
    )
    if base_folder and not (folder / "tokenizer_config.json").is_file():  # adapters that were saved alone
        folder = base_folder
    return request, open_tokenizer(folder, gguf_file=gguf_file, trust_remote_code=trust_remote_code)


def find_base(name: str | None) -> Path | None:
    """Return the folder of the base that ``--base`` names; None without the option. Raise ConfigError if it is not found."""
    from horizon_lm.model.hub import local_folder

    try:
        return local_folder(name) if name else None
    except ConfigError as error:
        raise ConfigError(f"--base: {error}") from error


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Context manager: disable garbage collection while importing libraries, which makes the imports about 15% faster."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def print_version(wanted: bool) -> None:
    """If ``wanted``, print the versions of Horizon-LM and of the packages that its numbers depend on, and exit."""
    if not wanted:
        return
    print(f"horizon-lm {horizon_lm.__version__}")
    for name in ("torch", "transformers", "numba"):
        try:
            print(f"{name} {installed_version(name)}")
        except PackageNotFoundError:
            print(f"{name} is not installed")
    raise typer.Exit


def find_vision(request: Any) -> Any:
    """Return the processor of the images of a model that is to be opened (an `OpenRequest`); None if it reads only text."""
    from horizon_lm.engine.opening.model_opening import find_folder
    from horizon_lm.model.adapters import class_of_adapters
    from horizon_lm.model.hf_config import load_config
    from horizon_lm.model.source import ModelSource
    from horizon_lm.runs.data.vision import vision_of

    if request.gguf_file is not None:
        return None
    request, folder = find_folder(request)  # of the base, if the model is a folder of adapters
    trusts = request.trust_remote_code
    config = load_config(folder, trusts)
    model_class = class_of_adapters(request.adapters, config)
    return vision_of(ModelSource(config, str(folder), folder, model_class=model_class, trust_remote_code=trusts))
