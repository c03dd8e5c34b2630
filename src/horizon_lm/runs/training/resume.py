"""Find the checkpoint that a run goes on from, and reject it if the run would not be the same one."""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import xxhash

from horizon_lm.errors import ConfigError
from horizon_lm.model.components import Component
from horizon_lm.model.folder import weight_files
from horizon_lm.planning.arithmetic.request import Request
from horizon_lm.runs.checkpoints.checkpoint import read_state
from horizon_lm.runs.checkpoints.finding import require_checkpoint
from horizon_lm.runs.checkpoints.manifest import installed_packages, read_manifest, verify
from horizon_lm.runs.config.rules import OnResume
from horizon_lm.runs.config.run import RunConfig, settings_with
from horizon_lm.runs.data.chat_template import today
from horizon_lm.runs.training.output_folder import output_folder, require_unlocked
from horizon_lm.runs.training.resumable import (
    begins_anew,
    checkpoints_to_resume,
    names_checkpoint,
    remedy_of_changes,
    require_same_training,
)
from horizon_lm.runs.training.rows import RunData
from horizon_lm.runs.training.run_state import FORMAT, ResumePoint, reading

# Settings that the plan chooses, unless they are set.
_OPEN_TO_PLAN = set(Request.names_of_choices()) - settings_with(OnResume.FREE)
_VERSIONS = ("horizon-lm", "torch", "transformers", "numba")
_PIECES, _PIECE_BYTES = 256, 4096  # of each file of weights, by which they are identified


def find_resume_point(config: RunConfig) -> tuple[ResumePoint | None, list[str]]:
    """Return the checkpoint that ``resume_from_checkpoint`` selects, or None to begin anew, and lines that say so.

    All files of the checkpoint are read and verified. If the newest one in ``output_dir`` is damaged, the one before is selected.

    Raises:
        ConfigError: there is no checkpoint, or none that is not damaged; or another run is writing into ``output_dir``.
    """
    if begins_anew(config):
        return None, []
    output = output_folder(config)
    require_checkpoint(config.resume_from_checkpoint, output)
    checkpoints = checkpoints_to_resume(config)
    if names_checkpoint(config):
        point = open_point(checkpoints[0])
        return point, [_resume_line(point)]
    if checkpoints:
        require_unlocked(output)  # or checkpoints that are being deleted would look damaged
        return _newest_undamaged(checkpoints)
    was_interrupted = (output / "metrics.jsonl").exists()
    return None, [f"resume: {output} has no checkpoint, so the run begins anew"] if was_interrupted else []


def _newest_undamaged(checkpoints: Sequence[Path]) -> tuple[ResumePoint, list[str]]:
    """Return the last undamaged one of these checkpoints, and lines about it and the damaged ones. Raise ConfigError if all are damaged."""
    problems: list[str] = []
    for folder in reversed(checkpoints):
        try:
            point = open_point(folder)
            return point, [*problems, _resume_line(point)]
        except ConfigError as error:
            problems.append(f"resume: warning: {error}")
    raise ConfigError(
        "\n".join([*problems, "no checkpoint can be used; remove them, or set resume_from_checkpoint: false"])
    )


def _resume_line(point: ResumePoint) -> str:
    return f"resume: from {point.folder} (step {point.step} of {point.state['num_steps']})"


def rows_of_all_ranks(point: ResumePoint | None, config: RunConfig, num_ranks: int) -> int:
    """Return the number of rows in a step of all ranks: the checkpoint's, whatever the number of ranks is now, unless the settings
    of the batch have changed.
    """
    by_settings = config.rows_per_step * num_ranks
    if point is None or _saved_rows_of_rank(point, config) != config.rows_per_step:
        return by_settings
    return int(point.state.get("rows_per_step", by_settings))


def _saved_rows_of_rank(point: ResumePoint, config: RunConfig) -> int:
    """Return the rows of a step of one rank by the settings of a checkpoint's run."""
    saved = _saved_settings(point, "config", config)
    return int(saved["per_device_train_batch_size"] * saved["gradient_accumulation_steps"])


def open_point(folder: Path, verifies: bool = True) -> ResumePoint:
    """Open a checkpoint of a run; ``verifies``: read all its files. Raise ConfigError if it is damaged, or was not written by a run."""
    manifest = read_manifest(folder)
    if verifies:
        verify(folder, manifest)
    state = read_state(folder)["state"]
    missing = object()  # of none of the types
    if not isinstance(state, dict) or any(
        not isinstance(state.get(name, missing), types) for name, types in FORMAT.items()
    ):
        raise ConfigError(f"{folder} was not written by `horizon-lm train`; load it with horizon_lm.load_checkpoint")
    return ResumePoint(folder, manifest, state)


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings of a run as plain data."""
    return config.model_dump(mode="json")


def apply_settings(config: RunConfig, point: ResumePoint, num_ranks: int = 1) -> tuple[RunConfig, list[str]]:
    """Return the settings with which a run goes on, and warnings about changes.

    Settings that are left to the plan, as they were before, have the values that the plan of the checkpoint's run chose. With another
    number of ranks, a step keeps its number of rows.

    Raises:
        ConfigError: settings or versions have changed that decide the numbers of a run, or what it trains.
    """
    require_same_training(config, point.folder, bool(point.manifest.base))
    with reading(point):
        before, now = _saved_settings(point, "config", config), settings_of(config)  # both as the user has set them
        warnings = _check_changes(point, config, before, now, num_ranks) + rounding_warnings(before, now)
        settled = _saved_settings(point, "settled", config)
        update = {name: settled[name] for name in _OPEN_TO_PLAN if before[name] == now[name]}
        rows = rows_of_all_ranks(point, config, num_ranks)
        if rows != config.rows_per_step * num_ranks:
            ranks_before = rows // _saved_rows_of_rank(point, config)
            warnings.append(f"resume: {num_ranks} processes instead of {ranks_before}; a step keeps its {rows} rows")
            update |= _batch_settings(config, rows_of_rank=math.ceil(rows / num_ranks))
        return config.model_copy(update=update), warnings


def _check_changes(
    point: ResumePoint, config: RunConfig, before: Mapping[str, Any], now: Mapping[str, Any], num_ranks: int
) -> list[str]:
    """Return a warning about changed settings, rows per step and versions that decide the numbers of a run.

    Args:
        point: the checkpoint.
        config: the settings of the run.
        before, now: the settings of the checkpoint's run and of this one, as the user has set them.
        num_ranks: the present number of ranks.

    Raises:
        ConfigError: such changes are not allowed.
    """
    changed = sorted(name for name in {**before, **now} if before.get(name) != now.get(name))
    may_change = settings_with(OnResume.FREE) | settings_with(OnResume.ROUNDING)
    changes = [_change(name, before, now) for name in changed if name not in may_change]
    rows_now = config.rows_per_step * num_ranks
    rows_before = point.state.get("rows_per_step", rows_now)
    # Another number of ranks is no change of settings: the step keeps its rows.
    if _saved_rows_of_rank(point, config) != config.rows_per_step and rows_before != rows_now:
        changes.append(f"rows per step: {rows_before} -> {rows_now}")
    packages, installed = point.manifest.packages, installed_packages()
    changes += [_change(name, packages, installed) for name in _VERSIONS if packages.get(name) != installed.get(name)]
    # The state of the checkpoint fits the choices of its plan, so a setting may also have that value, or be left to the plan.
    settled = _saved_settings(point, "settled", config)
    of_state = [name for name in changed if name in settings_with(OnResume.STATE)]
    misfits = [name for name in of_state if now[name] not in (settled.get(name), "auto")]
    return _reject_or_warn(point, changes, config, misfits)


def _saved_settings(point: ResumePoint, kind: str, config: RunConfig) -> dict[str, Any]:
    """Return the settings of the checkpoint's run: its "config" as the user has set them, or "settled" with the choices of its plan.

    A checkpoint may be older than a setting, which then had no other value than its default.
    """
    defaults = {name: field.default for name, field in type(config).model_fields.items() if not field.is_required()}
    return defaults | point.state[kind]


def _batch_settings(config: RunConfig, rows_of_rank: int) -> dict[str, int]:
    """Return the settings by which memory is planned for these rows of a rank in a step."""
    accumulation = math.ceil(rows_of_rank / config.per_device_train_batch_size)
    return {
        "gradient_accumulation_steps": accumulation,
        "per_device_train_batch_size": math.ceil(rows_of_rank / accumulation),
    }


def rounding_warnings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a warning if settings have changed that decide how a resumed run rounds."""
    names = sorted(name for name in settings_with(OnResume.ROUNDING) if before.get(name) != now.get(name))
    if not names:
        return []
    changes = ", ".join(_change(name, before, now) for name in names)
    return [f"resume: warning: {changes}: rounding and dropout will differ from an uninterrupted run"]


def choice_warnings(point: ResumePoint, given: RunConfig, config: RunConfig) -> list[str]:
    """Return a warning if the plan has chosen other settings than the checkpoint's run had, because memory is scarcer, say.

    Args:
        point: the checkpoint.
        given: the settings as the user has set them.
        config: the settings with the plan's choices.
    """
    asked, now = settings_of(given), settings_of(config)
    asked_before, settled = (_saved_settings(point, kind, config) for kind in ("config", "settled"))
    # Where the user has changed a setting, another value is no choice of the plan.
    unchanged = [name for name in _OPEN_TO_PLAN if asked_before[name] == asked[name]]
    return rounding_warnings({name: settled[name] for name in unchanged}, {name: now[name] for name in unchanged})


def length_warnings(point: ResumePoint, num_steps: int) -> list[str]:
    """Return a warning if changed settings have made the run so short that no step is left to train."""
    if point.step < num_steps or num_steps == point.state["num_steps"]:
        return []
    return [
        f"resume: warning: the checkpoint is at step {point.step}, and the run ends at step {num_steps}: nothing is trained; "
        "raise max_steps or num_train_epochs to go on"
    ]


def day_of_run(point: ResumePoint | None) -> str:
    """Return the date that chat templates print in a run: the day on which it has begun."""
    if point is None:
        return today()
    with reading(point):
        return date.fromisoformat(point.state["data"].get("day") or today()).isoformat()


def data_position(data: RunData, step: int, day: str) -> dict[str, Any]:
    """Return plain data that identifies the rows of a run, their order after a number of steps, and the date of the run."""
    rows, sampler = data.training.packed, data.loader.sampler
    epoch, step_of_epoch = divmod(step, sampler.steps_per_epoch)
    return {
        "rows": rows.content_hash, "tokens": rows.token_hash, "num_rows": len(rows),
        "seed": sampler.seed, "epoch": epoch, "step": step_of_epoch,
        "order": hashlib.sha256(sampler.epoch_order(epoch).tobytes()).hexdigest(), "weights": list(sampler.weights), "day": day,
        "num_tokens": int(rows.num_tokens.sum()), "num_targets": int(rows.num_targets.sum()), "origin": dict(data.origin),
    }  # fmt: skip


def require_same_rows(point: ResumePoint, position: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return warnings about rows that have changed. Raise ConfigError unless changes are allowed."""
    with reading(point):
        saved = point.state["data"]
        if saved["rows"] == position["rows"] and saved["order"] == position["order"]:
            return []
        if saved["rows"] != position["rows"]:
            change = f"the training rows ({_changes_of_rows(saved, position)})"
        else:
            names = [name for name in ("weights", "seed", "epoch") if saved.get(name) != position[name]]
            changes = ", ".join(_change(name, saved, position) for name in names)
            change = f"the order of the rows{f' ({changes})' if changes else ''}"
        return _reject_or_warn(point, [change], config)


_COUNTS = {"num_rows": "rows", "num_tokens": "tokens", "num_targets": "tokens to train on"}


def _changes_of_rows(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe how the rows have changed: in their counts, or else in tokens, or else in images; and in the tokenizer, the chat template
    or the packages, if these are other ones. Both arguments are results of `data_position`.
    """
    counts = [
        f"{before[name]:,} -> {now[name]:,} {unit}"
        for name, unit in _COUNTS.items()
        if name in before and before[name] != now[name]
    ]
    old, new = before.get("origin", {}), now["origin"]
    others = [f"another {name}" for name in ("tokenizer", "chat template") if old.get(name, new[name]) != new[name]]
    packages = old.get("packages", new["packages"])
    if packages != new["packages"]:
        others.append(f"{packages} -> {new['packages']}")
    content = "images" if before.get("tokens") == now["tokens"] else "tokens"
    return ", ".join([*(counts or [f"other {content} in {now['num_rows']:,} rows"]), *others])


def model_settings(model: Any) -> dict[str, Any]:
    """Return the config of a model as plain data, without the fields that do not change what it computes."""
    found: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return _without(found, {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"})


def _without(content: Any, names: set[str]) -> Any:
    """Return nested mappings without these keys, at any depth."""
    if isinstance(content, dict):
        return {name: _without(value, names) for name, value in content.items() if name not in names}
    return content


def require_same_model(point: ResumePoint, model_config: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return warnings about a changed config.json. Raise ConfigError unless changes are allowed."""
    saved = point.state["model_config"]
    names = sorted(name for name in {**saved, **model_config} if saved.get(name) != model_config.get(name))
    return _reject_or_warn(point, [f"config.json: {name}" for name in names], config)


def require_same_frozen(point: ResumePoint, config: RunConfig) -> None:
    """Raise ConfigError if components are frozen that the run has trained so far, or the reverse, as new rows with images have it.

    Args:
        point: the checkpoint.
        config: the settings of the run, once its rows are read.
    """
    with reading(point):
        before, now = _saved_settings(point, "settled", config), settings_of(config)
        names = [each.setting for each in Component if before[each.setting] != now[each.setting]]
        _reject_or_warn(point, [_change(name, before, now) for name in names], config, names)


def starting_weights(point: ResumePoint | None, folder: Path, config: RunConfig) -> tuple[str, list[str]]:
    """Return the hash of the weights that a run has started from, and warnings about other weights in the folder of its model.

    Raises:
        ConfigError: the folder has other weights, and changes are not allowed.
    """
    present = _sample_weights(folder, config.gguf_file)
    if point is None:
        return present, []
    with reading(point):
        before = point.state.get("weights", present)  # missing in a checkpoint of an earlier version
        if before == present:
            return present, []
        name_before, name = point.state["config"]["model_name_or_path"], config.model_name_or_path
        named = f"{name_before} -> {name}" if name_before != name else name
        change = f"the weights of the model ({named}; a resumed run goes on with those of its checkpoint)"
        return before, _reject_or_warn(point, [change], config)


def _sample_weights(folder: Path, gguf_file: str | None) -> str:
    """Return the xxh3-128 of the sizes of a model's weight files, and of pieces that are spread evenly over each.

    Weights of another model or training have another hash; the folder does not matter. Not all bytes are read, which may take long.
    """
    digest = xxhash.xxh3_128()
    for path in weight_files(folder) if gguf_file is None else [folder / gguf_file]:
        with path.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            digest.update(size.to_bytes(8, "little"))
            stride = max(_PIECE_BYTES, size // _PIECES)
            for start in range(0, size, stride):
                stream.seek(start)
                digest.update(stream.read(_PIECE_BYTES))
    return digest.hexdigest()


def _reject_or_warn(
    point: ResumePoint, changes: Sequence[str], config: RunConfig, of_state: Sequence[str] = ()
) -> list[str]:
    """Raise ConfigError for changes that a resumed run may not have. Return them as a warning if ``resume_with_changes`` is set.

    Args:
        point: the checkpoint.
        changes: all that has changed.
        config: the settings of the run.
        of_state: changed settings with which the state of the checkpoint cannot be loaded.
    """
    if not changes:
        return []
    if of_state or not config.resume_with_changes:
        raise ConfigError(
            f"{point.folder} cannot be resumed, because these have changed: {'; '.join(changes)}. "
            f"Remedy: {remedy_of_changes(config, of_state)}"
        )
    return [f"resume: warning: changed, so the run differs from an uninterrupted one: {'; '.join(changes)}"]


def _change(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return f"{name}: {before[name]} -> {now[name]}" if name in before and name in now else name
