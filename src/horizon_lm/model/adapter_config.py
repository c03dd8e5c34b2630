"""Read the config of adapters in a folder, and reject what PEFT would spend minutes or gigabytes on."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from stat import S_IMODE
from typing import Any

from safetensors import SafetensorError, safe_open

from horizon_lm.common.paths import require_inside, require_own_files
from horizon_lm.common.run_folders import require_model_folder
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.model.config_limits import read_settings
from horizon_lm.model.folder import ADAPTER_CONFIG
from horizon_lm.model.pattern_trial import is_pattern, require_few_pairs, require_quick

ADAPTER_WEIGHTS = "adapter_model.safetensors"
NO_PEFT = "adapters need PEFT: pip install 'horizon-lm[peft]'"
_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
_MAX_NUMBER = 2**20  # of any setting; published adapters have ranks up to 4,096
_SMALL_RANK = 128  # allowed in any case: PEFT lowers the rank in a narrower layer, as the default of AdaMSS, 100
_MAX_HEADER_BYTES = 2**24  # of the weights; published adapters have up to 2**20
_MAX_ITERATIONS = 1_000  # of an initialization by singular values
_NO_NAMES = ("base_model_name_or_path", "revision", "auto_mapping", "peft_version")  # settings that name no modules
_MATCHED_WHOLE = ("target_modules", "exclude_modules", "feedforward_modules")  # PEFT compares these with whole names


def require_adapter_config(folder: Path) -> None:
    """Raise ConfigError if a folder has no config of adapters."""
    if not (folder / ADAPTER_CONFIG).is_file():
        require_model_folder(folder)
        raise ConfigError(f"{folder} has no {ADAPTER_CONFIG}; it is not the folder of adapters")


def require_weights(folder: Path) -> Path:
    """Return the file of the adapters in a folder. Raise ConfigError if there is none in safetensors, because PEFT would
    read a pickle.
    """
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise ConfigError(f"{folder} has no {ADAPTER_WEIGHTS}; save the adapters as safetensors")
    require_inside(path, folder)
    return path


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the config of the adapters in a folder.

    Raises:
        ConfigError: it cannot be read, it or the weights lead out of the folder, or a size is one that no adapter has.
    """
    require_own_files(folder, _FILES)
    path = folder / ADAPTER_CONFIG
    content = read_settings(path)
    for key, value in _leaves(content):
        if type(value) is int and value > _MAX_NUMBER:
            raise ConfigError(
                f"{path}: {key} is {value:,}, more than the {_MAX_NUMBER:,} that are supported; correct it"
            )
    iterations = str(content.get("init_lora_weights")).rpartition("_niter_")[2]  # as in pissa_niter_16
    first_digits = iterations[:9]  # int() rejects numbers of thousands of digits
    if iterations.isdecimal() and int(first_digits) > _MAX_ITERATIONS:
        raise ConfigError(f"{path}: init_lora_weights has {first_digits} iterations; write at most {_MAX_ITERATIONS:,}")
    if (folder / ADAPTER_WEIGHTS).is_file():
        _require_rank_of_weights(content, folder)
    return content


def _require_rank_of_weights(content: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError if a rank in a config is larger than every axis of the weights beside it, because PEFT would allocate matrices of
    this rank before it reads them.
    """
    path, ranks = folder / ADAPTER_CONFIG, content.get("rank_pattern")
    declared = [content.get("r"), *(ranks.values() if isinstance(ranks, dict) else ())]
    rank = max((each for each in declared if type(each) is int), default=0)
    longest = _longest_axis(folder / ADAPTER_WEIGHTS)
    if rank > max(longest, _SMALL_RANK):
        raise ConfigError(
            f"{path}: the rank {rank:,} is not that of {ADAPTER_WEIGHTS}, whose longest axis has {longest:,}"
        )


def require_quick_names(content: Mapping[str, Any], names: list[str], place: object) -> None:
    """Raise ConfigError, naming ``place``, if PEFT would take too long to compare names in an adapter's config with a model's.

    Args:
        content: the config, as PEFT's file has it.
        names: names of all modules of the model.
        place: the file or the settings that the config is from.
    """
    given: set[tuple[str, str]] = set()  # each text, with the outermost key that it is under
    for key, value in content.items():
        if key not in _NO_NAMES:
            given |= {(key, text) for _, text in _leaves(value, key) if isinstance(text, str)}
    require_few_pairs(len(given), names, place)
    for key in ("rank_pattern", "alpha_pattern"):
        if isinstance(value := content.get(key), dict) and len(value) > len(names):
            raise ConfigError(
                f"{place}: {key} has {len(value):,} names, and the model {len(names):,} modules; correct it"
            )
    patterns = [pattern for key, text in sorted(given) if is_pattern(text) for pattern in _as_expressions(key, text)]
    require_quick(patterns, names, place)


def _as_expressions(key: str, text: str) -> tuple[str, ...]:
    """Return all regular expressions that PEFT may make of the text of a setting of its config."""
    if key in _MATCHED_WHOLE:
        return (text,)
    return (
        rf"(.*\.)?({text})$",
        rf"(^|.*\.){text}($|\..*)",
        rf"(?:^|.*?\.){text}\.(?P<idx>\d+)\.",
        rf"[\s\S]*?(?:{text})",
    )


def share_weights(folder: Path) -> None:
    """Give the weights of adapters that PEFT has written the permissions of their configs.

    A config gets those of any new file, by the umask; safetensors creates its files for their owner alone.

    Args:
        folder: the folder of an adapter; it may have a folder for each further one.
    """
    for weights in _weight_files(folder):
        weights.chmod(S_IMODE(weights.with_name(ADAPTER_CONFIG).stat().st_mode))


def convert_weights(folder: Path, dtype: str) -> None:
    """Convert the weights of adapters that PEFT has written, because it writes the dtype of the parameters in any case.

    Args:
        folder: the folder of an adapter; it may have a folder for each further one.
        dtype: dtype of the weights from now on, such as ``bfloat16``.
    """
    import torch
    from safetensors.torch import load_file, save_file

    for weights in _weight_files(folder):
        save_file(
            {name: value.to(getattr(torch, dtype)) for name, value in load_file(weights).items()},
            weights,
            {"format": "pt"},
        )


def _weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights of the adapters in a folder and in the folders in it."""
    configs = (folder / ADAPTER_CONFIG, *folder.glob(f"*/{ADAPTER_CONFIG}"))
    return [weights for each in configs if (weights := each.with_name(ADAPTER_WEIGHTS)).is_file()]


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all plain values in nested settings, each with its key; keys of inner objects are values, too."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            if key:  # not the outermost, whose keys are the settings' own names
                yield key, name
            yield from _leaves(each, str(name))
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _leaves(each, key)
    else:
        yield key, value


def _longest_axis(path: Path) -> int:
    """Return the number of elements along the longest axis of the tensors in a file; raise ConfigError if it is damaged."""
    try:
        with path.open("rb") as file:
            if (length := int.from_bytes(file.read(8), "little")) > _MAX_HEADER_BYTES:
                raise ConfigError(f"{path} cannot be read (a header of {length:,} bytes); download it again")
        with safe_open(path, framework="pt") as tensors:
            sizes = [size for name in tensors.keys() for size in tensors.get_slice(name).get_shape()]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read ({first_line(error)}); download it again") from error
    return max(sizes, default=0)
