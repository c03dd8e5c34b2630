"""The rejections and the differences that are right, each with its reason; everything else is a failure."""

REJECTIONS = {  # a pattern of the message
    r"not in the table of proven models": "a model with code of its own; its user sets `allow_unproven_model=True`",
    r"torch\.float16 is not supported": "float16: its gradients need loss scaling; bfloat16 and float32 are supported",
    r"are in several blocks, each of which would train its own": "PEFT's VB-LoRA, UniLoRA and TinyLoRA share one trained tensor between blocks",
    r"PEFT's \w+ is not streamed": "PEFT's methods that were not compared with plain PEFT",
    r"was added, removed or replaced after horizon_lm\.stream": "PEFT's adaption prompt replaces the attention of a streamed model",
    r"a streamed model cannot be copied": "`copy.deepcopy` of a model that takes most of the memory",
    r"so its \.data cannot be replaced": "PEFT's merge of trained tokens replaces the storage of the embedding",
    r"torch_compile=True is not supported": "`compile=True` of `stream()` compiles the blocks",
    r"the input embedding of a streamed model has no gradient when": "the embedding called by itself, in training mode",
    r"the reference of this set was not computed before training": "DPO's precomputed reference of another set; a streamed `ref_model` is computed with any set",
    r"since this optimizer was created or this loss computed": "an adapter that is added after the optimizer was made",
    r"register_hook on a parameter of a streamed model": "hooks of parameters, in which LOMO updates; `update_in_backward` of ours does",
    r"a streamed model cannot be moved or cast": "`half()` and `float()` of a model, whose precision `stream()` chooses",
    r"DoRA of the input embedding is not streamed": "DoRA of the input embedding, which computes with the whole table",
    r"its forward writes the buffer": "adapters that write state in their forward, because a block is computed twice",
    r"have different values in .* they are one parameter": "`tie_word_embeddings=True` for a folder whose two tables differ",
    r"computes the loss without keeping the logits": "PEFT's CPT, whose loss is made of the logits; `head='whole'` keeps them",
    r"has an encoder or cross-attention": "an encoder and its decoder, as in T5",
    r"past_key_values need gradients": "PEFT's prefix tuning trains keys and values",
}
DIFFERENCES = {  # a pattern of the test's id and the difference: its trainings leave other values
    r"test_kto_trainer.*(test_compute_metrics|apo_zero_unpaired-True-True)|test_online_dpo_trainer.*ref_model": "the reference is a bf16 model, which streamed models compute in float32 on the CPU; with a float32 reference the values are equal",
    r"VLM::test_train_vlm(_text_only_data|_with_max_length)?(\[.*)?: rewards/accuracies ": "rewards of 1e-6 after three steps of 1e-6: rounding errors, whose signs the accuracy counts",
    r"KTOTrainerVLM::test_train_vlm_text_only_data.*: kl ": "a KL of 3e-5, the difference of sums of log-probabilities near 100, which are rounded to 8e-6",
    r"(GRPO|RLOO)TrainerVLM::test_train_vlm.*: norm of \S+k_proj\.bias ": "the bias of keys does not change attention, so its gradient is a rounding error",
    r"test_(rloo|grpo)_trainer.*(test_train_with_chat_template_kwargs|VLM::test_train_vlm(_with_pad_to_multiple_of)?(\[.*)?: (norm of|kl) )|test_sft_trainer.*test_train_vlm_prompt_completion.*Gemma[34].*: norm of ": "gradients near zero, and steps of 0.1: a plain model whose weights are moved by 1e-7 differs as much",
}
ALLOWED = {  # a pattern of the test's id: an error that the test expects is not raised
    "test_gradient_checkpointing_double_forward_raises": "two forward passes with activated LoRA before the backward: each block is recomputed with the hooks of its own forward",
}
