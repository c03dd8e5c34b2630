"""Plan a run, apply the choices of the plan, and reject the run if it cannot fit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from horizon_lm.common.optimizers import NO_MATRICES, OPTIMIZERS
from horizon_lm.common.streaming_options import StreamingOptions
from horizon_lm.errors import ConfigError, DoesNotFitError, TokenError
from horizon_lm.memory.layout.buffers import sum_buffers
from horizon_lm.memory.layout.ranks import WHOLE, Shard
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.arithmetic.choose import with_device_room
from horizon_lm.planning.arithmetic.device_memory import device_use
from horizon_lm.planning.arithmetic.interconnect import Interconnect
from horizon_lm.planning.arithmetic.plan import Plan, make_plan
from horizon_lm.planning.arithmetic.remedies import Remedy
from horizon_lm.planning.arithmetic.render import deficit_lines, remedy_lines
from horizon_lm.planning.arithmetic.request import ForwardBatch, Machine, Request, Saves
from horizon_lm.planning.arithmetic.residency import Residency
from horizon_lm.runs.admission.frozen_components import freeze_unreached, frozen_notes, trained_beside_text
from horizon_lm.runs.admission.inputs import RowShape, Source, compute_dtype, fetch_source, open_source
from horizon_lm.runs.admission.planned_images import images_of_tables, with_images_of_data
from horizon_lm.runs.admission.remedies import remedies_of
from horizon_lm.runs.admission.side_files import side_files
from horizon_lm.runs.admission.this_machine import this_machine
from horizon_lm.runs.config import DpoConfig, RunConfig
from horizon_lm.runs.data.loader import Loader
from horizon_lm.runs.data.token_dataset import TokenTable

_NO_SAVES = Saves()
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


def plan_run(
    run: RunConfig,
    source: Source,
    machine: Machine,
    *,
    rows: RowShape | None = None,
    num_steps: int | None = None,
    saves: Saves = _NO_SAVES,
    priced: bool = True,
    shard: Shard = WHOLE,
    num_ranks: int = 1,
    tokenizer: Any = None,
    counts_files: bool = True,
) -> Plan:
    """Return the plan of a run.

    Args:
        run: settings of the run; ``device`` is not ``auto``.
        source: model of the run.
        machine: machine of the run.
        rows: shape of the examples; None for the longest examples that the settings allow.
        num_steps: optimizer steps of the run; None if unknown.
        saves: checkpoints of the run.
        priced: simulate a step, if the rates of the machine and, for several ranks, of their links are known.
        shard, num_ranks: the range of each slab that this rank owns, and the number of ranks.
        tokenizer: tokenizer of the run; None if it is not loaded.
        counts_files: count the files without weights, too.

    Raises:
        ConfigError: the length of examples is not limited.
    """
    if rows is None:
        if run.max_length is None:
            raise ConfigError("max_length is null, so memory has no upper bound; give --max_length for the plan")
        rows = RowShape(run.max_length, run.max_length)
    run = freeze_unreached(run, source, rows)
    # Once each: the machine of an earlier plan has them already.
    machine = replace(machine, notes=list(dict.fromkeys([*machine.notes, *frozen_notes(run, source, rows)])))
    outline = source.outline(run, length=rows.length, masked=rows.masked)
    typical = None
    if rows.typical_length and machine.hardware is not None:
        typical = source.outline(run, length=rows.typical_length, masked=rows.masked)
    stored_bytes = source.checkpoint_bytes(outline.layout)
    request = make_request(
        run, source, rows, stored_bytes, num_steps=num_steps, saves=saves, shard=shard, num_ranks=num_ranks
    )
    if outline.whole_head_only:  # whatever the run asks for
        request = replace(request, head="whole", head_chunk_tokens=None)
    if counts_files:
        files = side_files(run, source, outline, num_steps, request.export_bytes, tokenizer)
        request = replace(request, side_files=files)
    if not machine.on_host and not machine.is_connected:  # ranks that run have taken this memory already
        machine = replace(machine, collective_bytes=_collective_bytes(shard.count, num_ranks, machine.interconnect))
    has_rates_of_links = num_ranks == 1 or machine.interconnect is not None
    plan = make_plan(outline, request, machine, priced and has_rates_of_links, typical)
    return replace(
        plan,
        reasons=[*plan.reasons, *_attention_reasons(run, source, plan, rows)],
        problems=[*plan.problems, *_problems_of_first_step(source, plan, rows)],
    )


# What NCCL takes outside of torch's allocator (estimates): for each communicator, and for each GPU that this one reaches. An
# all-to-all of 8 H100 takes 3.3 GB (nccl issue 1685).
_COMMUNICATOR_BYTES = 2**28
_PEER_BYTES = 448 * 2**20


def _collective_bytes(num_ranges: int, num_ranks: int, links: Interconnect | None) -> int:
    """Return the device bytes of collectives: scratch memory of sums, and what NCCL takes.

    Args:
        num_ranges: ranks that share a copy of the model.
        num_ranks: number of all ranks.
        links: the links between the devices; None if unknown, as if a copy's devices were in one machine.
    """
    gpus_of_machine, num_copies = num_ranges if links is None else links.gpus, num_ranks // num_ranges
    spans_machines = num_ranges > gpus_of_machine and num_ranges % gpus_of_machine == 0
    is_direct = links is None or not links.through_host
    num_peers = min(num_ranges, gpus_of_machine) - 1 if is_direct else 0
    num_bytes = num_peers * _PEER_BYTES
    # Two groups that a rank is in, each as its size and its ranks in one machine: its copy of the model, and its range in all copies.
    sizes_of_groups = ((num_ranges, gpus_of_machine if spans_machines else num_ranges), (num_copies, num_copies))
    for size, of_machine in sizes_of_groups:
        if size > 1:
            num_bytes += _COMMUNICATOR_BYTES + sum(sum_buffers(size, of_machine).values())
    return num_bytes


def _attention_reasons(run: RunConfig, source: Source, plan: Plan, rows: RowShape) -> list[str]:
    """Return a sentence that names the kernel of packed and padded rows, or none: on a CPU, without such rows, or without attention."""
    from horizon_lm.model.attention_kernels import kernel_of_segments
    from horizon_lm.model.attention_with_sinks import has_sinks

    config, hardware = source.config.get_text_config(), plan.machine.hardware
    if plan.machine.on_host or not rows.masked or not isinstance(getattr(config, "num_attention_heads", None), int):
        return []
    capability = None
    if hardware is not None and hardware.capability:  # 8.9 is (8, 9)
        capability = divmod(round(10 * hardware.capability), 10)
    used = plan.step.outline.attention
    sinks = has_sinks(source.model.skeleton())
    kernel = kernel_of_segments(config, used, compute_dtype(run), plan.step.settings.compiled, capability, sinks)
    return [f"attention: packed and padded rows use {kernel}"]


def _problems_of_first_step(source: Source, plan: Plan, rows: RowShape) -> list[str]:
    """Return the reasons for which the engine would reject the first step."""
    from horizon_lm.model.attention import large_mask

    outline, config = plan.step.outline, source.config.get_text_config()
    # Of the batch that is trained on, and of passes without gradients, such as those of evaluation.
    shapes = [(plan.request.rows, rows.length), *((each.rows, each.length) for each in plan.request.forwards)]
    problems = [
        large_mask(config, outline.attention, *shape, outline.compute_bytes, lambda: rows.masked) for shape in shapes
    ]
    if plan.request.optimizer.orthogonalizes and not plan.step.orthogonalized:
        problems.append(NO_MATRICES)
    return [problem for problem in problems if problem is not None]


def make_request(run: RunConfig, source: Source, rows: RowShape, stored_bytes: int, **others: Any) -> Request:
    """Return a request to the planner with the settings of a run. ``others``: fields of the request that no setting has."""
    grad = run.grad_dtype or ("float32" if run.precision == "float32" or run.use_peft else "bfloat16")
    return Request(
        **StreamingOptions.of(run),
        per_device_train_batch_size=run.per_device_train_batch_size,
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        sequences=_sequences(run),
        optimizer=OPTIMIZERS[run.optim],
        optimizers=OPTIMIZERS,
        moments=run.moments,
        grad_bytes=4 if grad == "float32" else 2,
        update_in_backward=run.update_in_backward,
        skips_steps=run.non_finite == "skip",
        clips_gradients=run.max_grad_norm > 0,
        compiled=run.device != "cpu" if run.compile == "auto" else bool(run.compile),
        forwards=tuple(_forwards(run, source, rows)),
        distinct_tokens=rows.distinct_tokens,
        tokens_per_step=rows.tokens,
        export_bytes=_ITEMSIZE[run.exported_dtype] if run.exported_dtype else source.stored_bytes,
        stored_bytes=stored_bytes,
        download_bytes=0 if source.is_local else stored_bytes,
        **others,
    )


def _sequences(run: RunConfig) -> int:
    """Return the number of sequences in a row."""
    return 2 if run.objective == "dpo" else 1


def _forwards(run: RunConfig, source: Source, rows: RowShape) -> Iterator[ForwardBatch]:
    """Yield the batches of a run that are computed without gradients."""
    sequences = _sequences(run)
    if run.has_held_out:
        size = run.per_device_eval_batch_size * sequences
        yield ForwardBatch(size, rows.eval_length, "per_device_eval_batch_size")
    if isinstance(run, DpoConfig):
        size = run.reference_batch_size * sequences
        yield ForwardBatch(size, rows.length, "precompute_ref_batch_size")
    if run.sample_prompts:
        # The tokenizer is not loaded yet, so count characters, which tokens are rarely shorter than.
        longest = rows.prompt_length or max(map(len, run.sample_prompts))
        length = longest + run.sample_max_new_tokens
        yield ForwardBatch(1, length, kept_bytes=source.cache_bytes(run, length))


def does_not_fit(plan: Plan, remedies: Sequence[Remedy], is_shown: bool = False) -> DoesNotFitError:
    """Return the error for a plan that does not fit, with remedies. ``is_shown``: the plan was printed, so its numbers are not repeated."""
    deficits = () if is_shown else (f"  {line}" for line in deficit_lines(plan))
    return DoesNotFitError("\n".join(["this run does not fit", *deficits, *remedy_lines(plan, remedies)]))


def apply_plan(run: RunConfig, plan: Plan) -> RunConfig:
    """Return the run with the planner's choice for each setting that was left open.

    If the planner could not try the blocks, the residency settings stay open: the engine chooses them with the first
    batch.
    """
    chosen = plan.step.settings.choices()
    if plan.step.outline.unknown:
        chosen |= {name: getattr(plan.request, name) for name in ("head_chunk_tokens", *Residency(0).options())}
    return run.model_copy(update=chosen)


def _require_known_tokens(rows: TokenTable, vocabulary: int | None) -> None:
    """Raise TokenError, with the row, if a row has a token beyond the embedding table of the model."""
    if vocabulary is None or all(int(ids.max()) < vocabulary for ids in rows.token_ids() if len(ids)):
        return
    for row in rows:  # the table may also have rows that are not used
        largest = max(int(each.ids.max()) for each in row.sequences if len(each.ids))
        if largest >= vocabulary:
            raise TokenError(
                f"{row.place}: token {largest:,} is beyond the model's {vocabulary:,} tokens; the tokenizer does not belong "
                "to these weights"
            )


_SMALLER = (0.75, 0.5, 0.25, 0.0)  # shares of the device memory that was too much, in the order in which they are tried
_USUAL_LENGTH = 1024  # assumed tokens of an example if max_length is not set


class Admission:
    """The check before a run starts that it fits. ``run.device`` must be a device, not ``auto``.

    Args:
        run: settings of the run.
        shard, num_ranks: the range of each slab that this rank owns, and the number of ranks.
        agree: makes the same machine of the machines of all ranks.
    """

    def __init__(
        self,
        run: RunConfig,
        shard: Shard = WHOLE,
        num_ranks: int = 1,
        agree: Callable[[Machine], Machine] | None = None,
    ) -> None:
        self._run, self._source, self._agree = run, open_source(run), agree
        self._plan = partial(plan_run, shard=shard, num_ranks=num_ranks)
        self._vocabulary: int | None = None

    @property
    def run(self) -> RunConfig:
        """The settings of the run; once it is admitted, with the plan's lasting choices and what is frozen."""
        return self._run

    @property
    def downloads_model(self) -> bool:
        """True if `fetch_model` would download the run's model."""
        return self._source.model.folder is None

    def fetch_model(self) -> ModelSource:
        """Return the run's model, whose files are on this machine afterwards."""
        if self.downloads_model:
            self._source = fetch_source(self._run)
        return self._source.model

    def reject_if_impossible(self) -> None:
        """Raise DoesNotFitError before examples are read if not even the shortest would fit. Find the vocabulary, which `admit` needs."""
        run, machine = self._run, self._machine()
        length = run.max_length or _USUAL_LENGTH
        plan_early = partial(self._plan, run, self._source, machine, priced=False, counts_files=False)
        plan = plan_early(rows=RowShape(length, length))
        self._vocabulary = plan.step.outline.layout.vocabulary
        shortest = RowShape(1, 1, masked=False, distinct_tokens=1)
        # What a run freezes once its rows are read may make it fit.
        if not plan.fits and not plan_early(rows=shortest).fits and not trained_beside_text(run, self._source):
            self._reject(plan)

    def admit(
        self, loader: Loader, held_out: Iterable[TokenTable], num_steps: int, saves: Saves, prompt_length: int,
        tokenizer: Any = None,
    ) -> Plan:  # fmt: skip
        """Return the plan for these examples, and keep them and the plan's lasting choices for later plans. Freeze what no example reaches.

        Raises:
            DoesNotFitError: the run does not fit; with remedies.
            TokenError: an example has a token that the model does not have.
        """
        held_out = list(held_out)
        assert isinstance(loader.rows, TokenTable)
        for table in (loader.rows, *held_out):
            _require_known_tokens(table, self._vocabulary)
        shape = RowShape.of(loader, held_out, prompt_length)
        self._run = freeze_unreached(self._run, self._source, shape)
        machine, tables = self._machine(), (loader.rows, *held_out)
        if any(table.has_images for table in tables):
            self._source, notes = with_images_of_data(self._run, self._source, shape, partial(images_of_tables, tables))
            machine = replace(machine, notes=[*machine.notes, *notes])
        self._plan_for = partial(
            self._plan, source=self._source, rows=shape, num_steps=num_steps, saves=saves, tokenizer=tokenizer
        )
        plan = self._plan_for(self._run, machine=machine)
        if not plan.fits and self._source.images is not None and len(plan.step.settings.slices) > 1:
            # Towers are planned as if they computed all images of a step at once, but the engine cuts them.
            note = "images: they may not fit, and are not counted: with device_micro_batch_size, towers take less than is known before"
            plan_text = partial(self._plan_for, source=replace(self._source, images=None))
            text = plan_text(self._run, machine=replace(machine, notes=[*machine.notes, note]))
            if text.fits:
                plan, self._plan_for = text, plan_text
        if not plan.fits:
            self._reject(plan)
        # No later plan changes these: moments are in checkpoints, and blocks are opened whole or in tiles.
        self._run = self._run.model_copy(
            update={"moments": plan.request.moments, "expert_tile": plan.step.settings.expert_tile}
        )
        return plan

    def smaller_plan(self, plan: Plan, residency: Residency | None = None) -> Plan | None:
        """Return the next smaller plan for the same examples, for a step that has run out of device memory.

        Only settings that the run leaves open are changed.

        Args:
            plan: the plan that was too large.
            residency: what stayed on the device in that step; None for what was planned.

        Returns:
            None if there is no smaller plan.
        """
        residency = residency or plan.step.settings.residency
        used = device_use(replace(plan.step, settings=plan.step.settings.keeping(residency))).total
        for share in _SMALLER:
            machine = with_device_room(plan.machine, int(share * used))
            planned = self._plan_for(self._run, machine=machine, priced=False)
            # Planned again with these choices for the machine as it is, so that the budgets show its limits.
            smaller = self._plan_for(apply_plan(self._run, planned), machine=plan.machine)
            if smaller.fits and device_use(smaller.step).total < used:
                return replace(smaller, reasons=planned.reasons)
        return None

    def out_of_memory(self, plan: Plan, problem: str) -> DoesNotFitError:
        """Return the error for a plan that was too large for a step: with the next smaller plan as its remedy, if any, else with others."""
        smaller = self.smaller_plan(plan)
        if smaller is not None:
            remedies = [Remedy(self._chosen_settings(smaller), "more transfers and recomputation", smaller)]
        else:
            used = device_use(plan.step).total
            smaller = self._plan_for(self._run, machine=with_device_room(plan.machine, int(_SMALLER[0] * used)))
            remedies = remedies_of(smaller, self._run, self._source)
        return DoesNotFitError("\n".join([problem, *remedy_lines(smaller, remedies)]))

    def _machine(self) -> Machine:
        """Return this machine in its present state, alike on all ranks."""
        machine = this_machine(self._run)
        return machine if self._agree is None else self._agree(machine)

    def _chosen_settings(self, plan: Plan) -> dict[str, Any]:
        """Return the settings that the run leaves open, as a plan chooses them."""
        given, chosen = StreamingOptions.of(self._run), StreamingOptions.of(apply_plan(self._run, plan))
        return {name: value for name, value in chosen.items() if value != given[name]}

    def _reject(self, plan: Plan) -> None:
        raise does_not_fit(plan, remedies_of(plan, self._run, self._source))
