"""Plan the training of a streamed model by a transformers Trainer: the bytes on host, device and disk, and the time."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from horizon_lm.common.optimizers import by_other_name
from horizon_lm.common.quantities import counted, format_bytes, format_seconds
from horizon_lm.common.units import block
from horizon_lm.engine.streamed import engine_of, forward_of, is_streamed
from horizon_lm.errors import ConfigError, StreamingError
from horizon_lm.integrations.trainer_ranks import mesh_of
from horizon_lm.integrations.trainer_rows import length_limit
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.model.adapter_kinds import adapted_model
from horizon_lm.model.adapters import PresentAdapters
from horizon_lm.model.opening import opened_dtype
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.source import ModelSource
from horizon_lm.model.tying import true_config
from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.planning.arithmetic.request import Machine, Saves
from horizon_lm.runs.admission.inputs import RowShape, Source
from horizon_lm.runs.admission.remedies import remedies_of
from horizon_lm.runs.admission.run_plan import does_not_fit, plan_run
from horizon_lm.runs.admission.this_machine import agree_on_machine, this_machine
from horizon_lm.runs.config import RunConfig, plan_config

_TWO_SEQUENCES = ("DPOConfig", "RewardConfig")  # TRL's arguments of trainers whose rows are pairs
_FUSED_HEAD = ("logprobs", "entropy")  # what TRL's trainers ask of the head, besides the loss


class TrainerPlan:
    """The plan of a Trainer's steps.

    Args:
        model: a streamed model.
        args: ``transformers.TrainingArguments``, or a config of TRL.
        length: tokens of the longest row.
        eval_length: tokens of the longest row of the eval set; 0 without one.
        num_steps: optimizer steps; None for ``args.max_steps``.
        machine: another machine, with one device, to plan for; None for this one.

    Raises:
        StreamingError: the model is not streamed.
    """

    def __init__(
        self, model: Any, args: Any, length: int, eval_length: int = 0, num_steps: int | None = None,
        machine: Machine | None = None,
    ) -> None:  # fmt: skip
        if not is_streamed(model):
            raise StreamingError("plan needs a streamed model; call horizon_lm.stream(model) first")
        self._model, self._args, self._other_machine = model, args, machine
        self._rows = RowShape(length, eval_length)
        self._num_steps = num_steps or (args.max_steps if args.max_steps > 0 else None)
        config = true_config(model)
        name = getattr(config, "name_or_path", "") or type(model).__name__
        classifier = _classifier(model)
        self._run = _run_config(model, args, self._rows, name, machine)
        opened = ModelSource(
            config, name, model_class=classifier, attn_implementation=self._run.attn_implementation,
            dtype=opened_dtype(self._run.precision),
        )  # fmt: skip
        self._source = Source(
            opened, getattr(getattr(config, "dtype", None), "itemsize", 2), is_local=True, is_streamed=True,
            head_values=_FUSED_HEAD if hasattr(args, "max_length") and classifier is None else (),
            adapters=_adapters(model),
            quantized=_StreamedCodecs(engine_of(model).store.codecs) if engine_of(model).store.codecs else None,
        )  # fmt: skip
        self._batch = args.per_device_train_batch_size * _sequences_per_row(args)

    def make(self) -> Plan:
        """Return the plan. If the Trainer accumulates gradients over several micro-batches, its micro-batches are kept if they fit;
        otherwise the planner chooses their size.
        """
        accumulates = self._args.gradient_accumulation_steps > 1
        if accumulates and self._run.device_micro_batch_size is None:
            made = self._plan_of(self._run.model_copy(update={"device_micro_batch_size": self._batch}))
            if made.fits:
                return made
        return self._plan_of(self._run)

    def apply(self, plan: Plan) -> None:
        """Let the model compute fewer rows at once than the Trainer's batch has, if that is what fits."""
        forward, rows = forward_of(self._model), plan.step.settings.rows_at_once(self._batch)
        if not forward.engine.options.in_micro_batches and rows < self._batch:
            forward.reconfigure(forward.engine.options.in_micro_batches_of(rows))

    def reject(self, plan: Plan) -> None:
        """Raise DoesNotFitError with the numbers of the plan and the changes that would help."""
        raise does_not_fit(plan, remedies_of(plan, self._run, self._source))

    def generation_lines(self, plan: Plan) -> Iterator[str]:
        """Yield a line with the forward passes, bytes and seconds of generation, if this trainer generates."""
        args = self._args
        batches_at_once = getattr(args, "steps_per_generation", None)  # for which completions are generated at once
        if batches_at_once is None or not getattr(args, "max_completion_length", None):
            return
        generations_per_step = args.gradient_accumulation_steps / batches_at_once
        # Of a step or, if several steps share a generation, of that generation.
        passes = round(args.max_completion_length * max(1.0, generations_per_step))
        rows = args.per_device_train_batch_size * batches_at_once
        loaded_for_rows, loaded_at_most = self._bytes_loaded_per_token(rows), self._bytes_loaded_per_token(None)
        experts = f" with the experts of {counted(rows, 'token')}" if loaded_for_rows < loaded_at_most else ""
        duration = ""
        if plan.machine.hardware is not None and (rate := plan.machine.hardware.link_in):
            duration = f": {format_seconds(passes * loaded_for_rows / rate)} at {format_bytes(rate)}/s"
        steps = "" if generations_per_step >= 1 else f", every {round(1 / generations_per_step)} steps"
        yield (
            f"generation{steps}: up to {passes:,} forward passes, one for each token, which load {format_bytes(loaded_for_rows)} "
            f"each{experts}{duration}"
        )

    def _bytes_loaded_per_token(self, rows: int | None) -> int:
        """Return the most bytes of weights that a forward pass over one token of each row loads.

        Args:
            rows: number of rows, whose tokens are routed to a part of the experts; None for so many rows that all experts are loaded.
        """
        engine = engine_of(self._model)
        slabs = [slab for unit in engine.store.units.values() for slab in unit.all]
        loaded = sum(slab.weights[slab.own].nbytes for slab in slabs)
        if rows is None or engine.mesh.size > 1:  # several ranks load all experts
            return loaded
        for index in engine.tiles.routed(rows):
            experts, of_block = engine.tiles.model.experts[index], engine.store.units[block(index)].all
            unread = experts.count - rows * experts.per_token  # at least so many, even if no two tokens share an expert
            num_bytes = sum(
                slab.layout.view(slab.weights, name).nbytes
                for slab in of_block
                for name in experts.names
                if name in slab.layout
            )
            loaded -= num_bytes * unread // experts.count
        return loaded

    def _plan_of(self, run: RunConfig) -> Plan:
        """Return the plan of a run on this machine, alike on all ranks."""
        mesh = mesh_of(self._model)
        return plan_run(
            run, self._source, agree_on_machine(mesh, self._machine()), rows=self._rows, num_steps=self._num_steps,
            saves=self._saves(), shard=mesh.shard, num_ranks=mesh.size,
        )  # fmt: skip

    def _machine(self) -> Machine:
        """Return this machine, less the memory of the model that is already loaded, which the plan counts itself."""
        if self._other_machine is not None:
            return self._other_machine
        machine, store = this_machine(self._run), engine_of(self._model).store
        # Low halves that a base had before its adapters were added are the only part of the model that the plan does not count.
        frozen = [store.units[unit].plain for unit in store.frozen]
        uncounted = sum(slab.low[slab.own].nbytes for slab in frozen if slab.low is not None)
        loaded = sum(store.num_bytes.values()) - uncounted
        return replace(machine, process_bytes=max(0, machine.process_bytes - loaded))

    def _saves(self) -> Saves:
        """Return the trainer's checkpoints: with ``save_strategy="best"``, as if each evaluation found a better model."""
        args = self._args
        if args.save_strategy == "best":
            num = self._num_occasions(args.eval_strategy, args.eval_steps)
        else:
            num = self._num_occasions(args.save_strategy, args.save_steps)
        # The newest is kept in any case, and the best one if it is loaded at the end.
        limit = args.save_total_limit and max(args.save_total_limit, 1 + args.load_best_model_at_end)
        return Saves(num=num, kept=min(num, limit or num), only_model=args.save_only_model, with_model=True)

    def _num_occasions(self, strategy: str, interval: float) -> int:
        """Return how often the trainer saves or evaluates by a strategy, the time after the last step included.

        ``interval`` counts steps, or is a share of all steps if below 1.
        """
        if strategy == "epoch":
            return math.ceil(self._args.num_train_epochs)
        if strategy == "no" or self._num_steps is None:
            return 0
        steps = interval if interval >= 1 else max(1, math.ceil(interval * self._num_steps))
        return math.ceil(self._num_steps / steps)


class _StreamedCodecs:
    """The quantized weights of a streamed model, by their names without adapters. Stands in for `Quantized` in a `Source`."""

    def __init__(self, codecs: Mapping[str, Codec]) -> None:
        self._codecs = {name.replace(".base_layer.", "."): codec for name, codec in codecs.items()}

    def codecs(self, parts: ModelParts) -> dict[str, Codec]:
        return {ref.name: self._codecs[ref.name] for ref in parts.refs() if ref.name in self._codecs}


def plan(model: Any, args: Any, length: int | None = None) -> Plan:
    """Return the plan of training a streamed model with these arguments of a Trainer; nothing is allocated.

    Args:
        model: a streamed model.
        args: ``transformers.TrainingArguments``, or a config of TRL.
        length: tokens of the longest row; None for the limit that ``args`` set.

    Raises:
        ConfigError: no length is given, and ``args`` set no limit.
        StreamingError: the model is not streamed.

    Examples:
        >>> from transformers import TrainingArguments
        >>> planned = horizon_lm.plan(model, TrainingArguments(use_cpu=True), length=16)
        >>> planned.fits
        True
    """
    length = length or length_limit(args)
    if length is None:
        raise ConfigError("the longest row is not known: set max_length, or give plan(model, args, length=...)")
    return TrainerPlan(model, args, length).make()


def _classifier(model: Any) -> Any:
    """Return the class of transformers that opens this model if it classifies rows; None for a causal language model."""
    from transformers import AutoModelForSequenceClassification

    name = type(adapted_model(model)).__name__
    return AutoModelForSequenceClassification if name.endswith("ForSequenceClassification") else None


def _adapters(model: Any) -> PresentAdapters | None:
    """Return the adapters of a streamed model; None if it has none."""
    horizon = forward_of(model)
    if not horizon.adapter_params:
        return None
    return PresentAdapters(model, [name for names in horizon.engine.trainable().values() for name in names])


def _run_config(model: Any, args: Any, rows: RowShape, name: str, machine: Machine | None) -> RunConfig:
    """Return the settings of a run that trains like this Trainer.

    Args:
        model, args: as in `TrainerPlan`.
        rows: the shape of the rows.
        name: its ``model_name_or_path``.
        machine: another machine, where the options that were chosen for the device of this one are chosen again; None for this one.
    """
    engine = engine_of(model)
    options, precision = engine.options, engine.store.precision
    theirs = getattr(args.optim, "value", args.optim)
    optim, moments = by_other_name(theirs) or ("adamw", "8bit" if "8bit" in theirs else "float32")
    settings = {
        "model_name_or_path": name,
        "output_dir": args.output_dir,
        "device": str(engine.device.torch_device) if machine is None else "cpu" if machine.on_host else "cuda",
        "precision": precision.name,
        "grad_dtype": str(precision.grad_dtype).removeprefix("torch."),
        "max_length": rows.length,
        "per_device_train_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps * _sequences_per_row(args),
        "optim": optim,
        "moments": moments,
        "mlp_chunk_tokens": options.mlp_chunk_tokens,
        "products": options.products,
        "allow_unproven_model": True,  # whether it may be streamed was decided when it was
    }
    settings |= (
        {"compile": options.compile, **options.choices()} if machine is None else {"expert_tile": options.expert_tile}
    )
    if rows.eval_length:
        settings |= {"test_split_size": 1, "per_device_eval_batch_size": args.per_device_eval_batch_size}
    params = list(model.named_parameters())
    if _adapters(model) is None and not all(param.requires_grad for _, param in params):
        settings["trainable"] = "|".join(name for name, param in params if param.requires_grad)
    return plan_config(**settings)


def _sequences_per_row(args: Any) -> int:
    """Return the number of sequences in a row: two for trainers of pairs."""
    return 2 if any(each.__name__ in _TWO_SEQUENCES for each in type(args).__mro__) else 1
