"""Name the replacement or the remedy for settings of other trainers."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from ruamel.yaml import YAML


@cache
def tables() -> dict[str, Mapping[str, Any]]:
    """Return the translation table of each trainer, by the stem of its file."""
    folder, yaml = files("horizon_lm.config.translate"), YAML(typ="safe", pure=True)
    return {
        name: yaml.load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
        for name in ("trl", "llamafactory", "axolotl")
    }


def our_name(theirs: str) -> str | None:
    """Return our name for another trainer's setting, or None if no table renames it."""
    return next((table["rename"][theirs] for table in tables().values() if theirs in table.get("rename", {})), None)


_ONE_DEVICE = "a run has one process and one device; remove it"
_RECOMPUTED = "every block is recomputed in the backward pass unless resident_graphs keeps it; remove it"
_STREAMED = "weights are always streamed from host memory; remove it"
_PRECISION = "weights are bf16 with an fp32 master by default; see precision"
_BATCHES = "batches are built from rows on disk as steps need them; remove it"
_PLANNED = "the plan fits the run into memory before it starts; remove it"
_KERNELS = "not supported; remove it"
_LOSS = "this variant of the loss is not supported; remove it, or pass train() an objective of your own"
_LOGS = "logging_steps decides when metrics are written; remove it"
_EVALUATION = "the eval set is evaluated before and after training and as eval_strategy says; remove it"
_HUB = "the finished model is uploaded once, with the account that is logged in; remove it"
_TRACKIO = "set it in trackio's own environment variables; remove it"

UNSUPPORTED = {  # the replacement or remedy, by name
    # settings of SFTConfig, DPOConfig and TrainingArguments
    **dict.fromkeys(
        (
            "accelerator_config", "average_tokens_across_devices", "ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb",
            "ddp_find_unused_parameters", "ddp_static_graph", "ddp_timeout", "local_rank", "log_level_replica",
            "log_on_each_node", "parallelism_config", "save_on_each_node",
        ),
        _ONE_DEVICE,
    ),
    **dict.fromkeys(
        ("activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing", "gradient_checkpointing_kwargs"),
        _RECOMPUTED,
    ),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "activation_offloading"), _STREAMED),
    **dict.fromkeys(("bf16", "bf16_full_eval", "fp16", "fp16_full_eval", "tf32"), _PRECISION),
    **dict.fromkeys(
        (
            "dataloader_drop_last", "dataloader_in_order", "dataloader_multiprocessing_context", "dataloader_num_workers",
            "dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "remove_unused_columns",
            "ignore_data_skip", "length_column_name", "train_sampling_strategy", "pad_to_multiple_of", "label_names",
        ),
        _BATCHES,
    ),
    **dict.fromkeys(("auto_find_batch_size", "skip_memory_metrics", "torch_empty_cache_steps"), _PLANNED),
    **dict.fromkeys(
        (
            "use_liger_kernel", "liger_kernel_config", "torch_compile_backend", "torch_compile_mode", "debug",
            "full_determinism", "enable_jit_checkpoint", "optim_args", "optim_target_modules",
        ),
        _KERNELS,
    ),
    **dict.fromkeys(
        (
            "discopop_tau", "f_alpha_divergence_coef", "f_divergence_type", "ld_alpha", "use_weighting", "sync_ref_model",
            "ref_model_mixup_alpha", "ref_model_sync_steps",
        ),
        _LOSS,
    ),
    **dict.fromkeys(
        (
            "disable_tqdm", "include_num_input_tokens_seen", "log_level", "logging_first_step", "logging_nan_inf_filter",
            "logging_strategy",
        ),
        _LOGS,
    ),
    **dict.fromkeys(
        (
            "batch_eval_metrics", "do_eval", "do_predict", "do_train", "eval_accumulation_steps", "eval_delay",
            "eval_do_concat_batches", "eval_on_start", "eval_use_gather_object", "include_for_metrics", "prediction_loss_only",
        ),
        _EVALUATION,
    ),
    "restore_callback_states_from_checkpoint": "states of callbacks are always restored; remove it",
    **dict.fromkeys(("hub_always_push", "hub_revision", "hub_strategy", "hub_token"), _HUB),
    **dict.fromkeys(("project", "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id"), _TRACKIO),
    "assistant_only_loss": "use train_on: assistant, which is the default for conversations",
    "completion_only_loss": "use train_on: completion, which is the default for a prompt and its completion",
    "dataset_kwargs": "rows are always tokenized; remove it",
    "dataset_text_field": "use columns in datasets: {text: NAME}",
    "eos_token": "change it in the model's tokenizer_config.json",
    "pad_token": "padding is marked by the attention mask and needs no token; remove it",
    "padding_free": "use packing, or attn_implementation: varlen",
    "model_init_kwargs": "use precision, attn_implementation and trust_remote_code",
    "optim": "the optimizer is AdamW; remove it, or see moments",
    "precompute_ref_log_probs": "the reference is always computed before training and cached on disk; remove it",
    "router_aux_loss_coef": "set it in the model's config.json, with output_router_logits to enable it; remove it",
    "shuffle_dataset": "rows are packed in order and then shuffled in every epoch; remove it",
    "torch_compile": "use compile",
    "truncation_mode": "long rows are always truncated at the end (keep_start); remove it",
    "use_cache": "it only affects generation; remove it",
    "use_cpu": "use device: cpu",
    # settings of their scripts and of other versions
    "attn_impl": "transformers calls it attn_implementation",
    "batch_size": "use per_device_train_batch_size",
    "dataset_name": "write it into datasets",
    "dataset_config": "use name in datasets: {path: ..., name: ...}",
    "dataset_train_split": "use split in datasets",
    "dataset_test_split": "use split in eval_datasets",
    "dtype": _PRECISION,
    "evaluation_strategy": "transformers calls it eval_strategy",
    "epochs": "transformers calls it num_train_epochs",
    "eval_dataset": "write it into eval_datasets",
    "lr": "transformers calls it learning_rate",
    "max_seq_length": "TRL calls it max_length",
    "max_prompt_length": "max_length limits prompt and answer together; remove it",
    "micro_batch_size": "use per_device_train_batch_size",
    "model": "use model_name_or_path",
    "neftune_noise_alpha": "noise on embeddings is not supported; remove it",
    "num_epochs": "transformers calls it num_train_epochs",
    "num_items_in_batch": "the loss is always the mean over all targets of a step; remove it",
    "torch_dtype": _PRECISION,
    "train_file": "write the file into datasets",
    "validation_file": "write the file into eval_datasets",
    "warmup_ratio": "use warmup_steps; values below 1 are a fraction of all steps",
}  # fmt: skip
