"""Exceptions to the general rules of shrinking, by model type.

``default``: arguments that the default config requires. ``set``: values of the tiny config. ``part`` and
``class``: the model is built from this part of the config, by this class of transformers.
"""

from typing import Any

_ZAMBA = ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"]
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_MROPE = _ROPE | {"mrope_section": [4, 2, 2]}
_YARN = {
    "type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 64, "max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
    "partial_rotary_factor": 8 / 24,
}  # fmt: skip
_COMPASS = {"rope_parameters": {"full_attention": _MROPE}}
_DOTS3 = {
    "num_hidden_layers": 4, "layer_types": None, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
    "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16, "mlp_layer_types": None, "sliding_window": 6,
}  # fmt: skip
_QWEN4 = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4,
    "ple_layer_ids": [1], "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 1, "eos_token_id": 2,
}  # fmt: skip
_SAM = {"output_channels": 16, "downsample_channels": [32, 64]}
_VQ = {"base_channels": 32, "channel_multiplier": [1, 1], "num_embeddings": 10, "latent_channels": 16, "embed_dim": 16}
_GEMMA4 = {"global_head_dim": 32}
_GEMMA3N = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 0, "intermediate_size": 96,
    "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0], "vocab_size_per_layer_input": 96,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
_MINICPM = {"image_token_id": 90, "insert_layer_id": 0}

OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "set": {
            "image_token_offset": 92, "audio_token_offset": 102, "vision_config": {"base_channels": 32, "channel_multiplier": [1, 1], "codebook_size": 10, "num_res_blocks": 1},
            "audio_config": {"codebook_dim": 64, "codebook_size": 8},
        }
    },
    "aria": {"set": {"projector_patch_to_query_dict": {16: 4}, "max_value_projector_patch_to_query_dict": 4}},
    "bamba": {"set": {"attn_layer_indices": [1]}},
    "blip-2": {"set": {"image_token_index": 90, "num_query_tokens": 4}},
    "chameleon": {"set": {"vocabulary_map": {"<image>": 90} | {f"IMGIMG{c}Z": 91 + i for i, c in enumerate("ABCDEFGHIJ")}, "vq_config": _VQ}},
    "cohere_compass": {"set": {"text_config": _COMPASS}},
    "cohere_compass_text": {"set": _COMPASS},
    "dbrx": {"set": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}}},
    "deepseek_ocr2": {
        "set": {
            "text_config": {"mlp_layer_types": ["dense", "sparse", "sparse"], "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
            "vision_config": {"sam_config": _SAM},
        }
    },
    "deepseek_v2": {"set": {"num_experts_per_tok": 2}},
    "deepseek_vl_hybrid": {"set": {"high_res_vision_config": {"output_channels": 16}}},
    "diffusion_gemma": {"set": {"text_config": {"global_head_dim": 32, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}}},
    "dots1": {"set": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}},
    "dots3_note": {"set": {"text_config": _DOTS3, "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64}, "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64}}},
    "dots3_note_text": {"set": _DOTS3},
    "emu3": {"set": {"vocabulary_map": {"<image>": 90, "<|extra_200|>": 91} | {f"<|visual token {i:06}|>": 92 + i for i in range(10)}, "vq_config": _VQ | {"hidden_size": 32, "codebook_size": 10}}},
    "ernie4_5_vl_moe": {"set": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]}, "moe_intermediate_size": [32, 16]}}},
    "falcon_h1": {"set": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16}},
    "fast_vlm": {"default": {"vision_config": {"model_type": "vitdet"}}},
    "florence2": {
        "set": {
            "vision_config": {
                "embed_dim": [16, 32], "num_heads": [2, 4], "num_groups": [2, 4], "depths": [1, 1], "patch_size": [7, 3],
                "patch_stride": [4, 2], "patch_padding": [3, 1], "patch_prenorm": [False, True], "projection_dim": 64,
            }
        }
    },
    "gemma3": {"set": {"mm_tokens_per_image": 4}},
    "gemma3n": {"set": {"text_config": _GEMMA3N}},
    "gemma3n_text": {
        "set": _GEMMA3N
    },
    "gemma4": {
        "default": {"vision_config": {"model_type": "gemma4_vision"}},
        "set": {"text_config": _GEMMA4, "vision_config": {"pooling_kernel_size": 2}},
    },
    "gemma4_text": {"set": _GEMMA4},
    "gemma4_unified": {
        "default": {"vision_config": {"model_type": "gemma4_unified_vision"}},
        "set": {"text_config": _GEMMA4, "vision_config": {"pooling_kernel_size": 1, "mm_posemb_size": 64, "output_proj_dims": 64}},
    },
    "gemma4_unified_text": {"set": _GEMMA4},
    "glm5_next": {"set": {"text_config": {"index_topk": 4, "index_kpool": 2}}},
    "gpt_neo": {"set": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 6}},
    "granite4_vision": {
        "set": {"downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [0, 1, 2, 1], "image_grid_pinpoints": [[16, 16]]}
    },
    "granitemoehybrid": {"set": {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}},
    "hunyuan_vl": {"set": {"vision_config": {"max_image_size": 32, "min_image_size": 16}}},
    "hy_v4_vl": {"set": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}}}},
    "inkling_mm_model": {"set": {"vision_config": {"patch_size": 4, "num_hidden_layers": 2}}},
    "instructblip": {"set": {"image_token_index": 90, "num_query_tokens": 4}},
    "instructblipvideo": {"set": {"video_token_index": 90, "num_query_tokens": 4}},
    "kosmos-2": {"set": {"latent_query_num": 4}},
    "kosmos-2.5": {"set": {"latent_query_num": 4, "vision_config": {"patch_embed_hidden_size": 48, "max_num_patches": 16}}},
    "lfm2_moe": {"set": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}},
    "janus": {"set": {"vq_config": _VQ}},
    "llama4": {"set": {"vision_config": {"intermediate_size": 256}}},
    "llava_next": {"set": {"image_grid_pinpoints": [[16, 16]]}},
    "llava_next_video": {"set": {"image_grid_pinpoints": [[16, 16]]}},
    "llava_onevision": {"set": {"image_grid_pinpoints": [[16, 16]]}},
    "longcat_flash": {"set": {"head_dim": 8, "qk_rope_head_dim": 8}},
    "mamba2": {"set": {"num_heads": 8}},
    "minicpm_ocr": {"set": _MINICPM},
    "minicpmv4_6": {"set": _MINICPM},
    "minicpmv4_7": {"set": _MINICPM},
    "mistral4": {"set": {"rope_parameters": _YARN}},
    "molmo2": {"set": {"adapter_config": {"vision_feature_layer": [-1, -2]}, "vision_config": {"image_size": [16, 16], "num_position_embeddings": 16}}},
    "muse_glimmer": {"set": {"out_hidden_size": 256}},
    "muse_spark": {"set": {"out_hidden_size": 256, "audio_config": {"patch_sizes": [4, 2], "hidden_sizes": [16, 32], "depths": [1, 1], "num_hidden_layers": 2}}},
    "musicgen": {"part": "decoder", "class": "MusicgenForCausalLM"},
    "musicgen_melody": {"part": "decoder", "class": "MusicgenMelodyForCausalLM"},
    "nemotron": {"set": {"num_key_value_heads": 2}},
    "nemotron_h_omni": {"set": {"vision_config": {"max_img_size": 32, "video_temporal_patch_size": 2}}},
    "paddleocr_vl": {"set": {"text_config": {"rope_parameters": _MROPE}}},
    "phi4_multimodal": {
        "set": {"vision_config": {"crop_size": 16}, "audio_config": {
            "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16, "bias_max_distance": 16}}
    },
    "pp_formulanet": {"set": {"vision_config": {"output_channels": 16, "post_conv_in_channels": 16, "post_conv_out_channels": 64, "post_conv_mid_channels": 32}}},
    "qwen2_5_omni_thinker": {"set": {"vision_start_token_id": 96, "vision_end_token_id": 97, "text_config": {"rope_parameters": _MROPE}}},
    "qwen3_omni_moe_thinker": {"set": {"vision_start_token_id": 96, "vision_end_token_id": 97, "text_config": {"rope_parameters": _MROPE}}},
    "qwen4_exp": {"set": {"text_config": _QWEN4}},
    "qwen4_exp_text": {"set": _QWEN4},
    "reformer": {"set": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [4, 4], "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8}},
    "shieldgemma2": {"set": {"mm_tokens_per_image": 4}},
    "step3p7": {"set": {"text_config": {"sliding_window": 6}}},
    "t5gemma2": {"set": {"mm_tokens_per_image": 4}},
    "unlimited_ocr": {"set": {"vision_config": {"sam_config": _SAM}}},
    "vipllava": {"set": {"vision_feature_layers": [-1, -2]}},
    "xmod": {"set": {"default_language": "en_XX"}},
    "zamba": {"set": {"num_hidden_layers": 5, "layers_block_type": _ZAMBA}},
    "zamba2": {"set": {"num_hidden_layers": 5, "layers_block_type": _ZAMBA}},
}  # fmt: skip

SAMPLE_IN_TRAINING = ("phimoe",)  # its router draws the experts of a token at random, even without dropout

_SHARED_KV = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_SHARED_INDEXER = {"indexer_types": ["full", "shared", "full"]}

# Configs whose blocks use results of earlier blocks.
SHARED_STATE: dict[str, dict[str, Any]] = {
    "gemma3n": _SHARED_KV,
    "gemma3n_text": _SHARED_KV,
    "gemma4": _SHARED_KV,
    "gemma4_text": _SHARED_KV,
    "gemma4_unified": _SHARED_KV,
    "gemma4_unified_text": _SHARED_KV,
    "glm_moe_dsa": _SHARED_INDEXER,
    "hy_v4": _SHARED_INDEXER,
    "mistral_large4": {"kv_source_layers": [0, 0, 2]},
}
