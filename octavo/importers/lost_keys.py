"""Decides which keys without translation are lost, that is, affect the results of training.

One table lists the keys that do not. Any other key that has no equivalent, is unknown or has no known value is lost,
and so is a key whose value may be changed by a line of a script that was not evaluated.
"""

from __future__ import annotations

import fnmatch
import re
from typing import Any

from octavo.importers.common.key_outcomes import Row

#: reason why keys do not affect training -> their names. A name with a dot is compared with the whole key,
#: a name without a dot with the last part of the key
NO_EFFECT_ON_TRAINING: dict[str, str] = {
    "metrics, logs, trackers and profiles":
    "log_* no_log_* logging_* tensorboard* wandb_* mlflow_* swanlab_* use_wandb use_mlflow use_swanlab "
    "use_tensorboard use_comet use_trackio use_otel_metrics use_pytorch_profiler trackio_* comet_* hf_mlflow_* "
    "otel_* gradio_* report_to run_name run_id project plot_loss metric metadata* console_log_interval progress_bar "
    "python_log_level timing_log_* include_num_input_tokens_seen include_tokens_per_second "
    "include_effective_tokens_per_second disable_tqdm add_version print_param_status profile profile_* profiler* "
    "enable_torch_profiler MM_TOOL_PATH tools.* training.profile.* callbacks callbacks.* loggers.* loggers "
    "enable_log_tensor save_tensor* debug debug_* eval_first spin_dataloaders skip_memory_metrics",
    "hubs and their tokens":
    "use_hf push_to_hub hub_* push_dataset_to_hub *hub_token hf_use_auth_token use_auth_token check_model "
    "download_mode download_* validate_hash keep_zip predownload cache_limit",
    "checkpoints and other output":
    "use_dist_ckpt use_persistent_ckpt_worker use_flash_ckpt save save_* saves_per_epoch output_dir ckpt_* dist_ckpt_* "
    "load_format distrib_optim_* auto_detect_ckpt_format exit_on_missing_checkpoint load_best_model_at_end "
    "metric_for_best_model greater_is_better early_stop* overwrite_output_dir only_*_checkpoint autoresume* "
    "max_shard_size merge_lora merge_method create_checkpoint_symlink export_* no_save_* resume_only_model "
    "load_strict* load_rank0_and_broadcast total_time_limit pre_terminate_time dataloader_save "
    "restore_callback_states_from_checkpoint enable_jit_checkpoint save_on_each_node no_load_rng no_load_optim",
    "evaluation and generation":
    "eval_* evals_per_epoch evaluation_strategy eval_loaders* *eval_batch_size val_interval val_micro_batch_size "
    "val_dataset_* per_device_eval_batch_size compute_accuracy icl_* lm_eval_* do_bench_eval bench_* "
    "do_causal_lm_eval batch_eval_metrics include_for_metrics prediction_loss_only predict_with_generate "
    "generation_* generate_samples num_generation_samples infer_* vllm_* vllm.* sglang_* *full_eval max_new_tokens "
    "temperature top_p top_k num_beams do_sample repetition_penalty length_penalty task task_dir lang n_shot",
    "processes, hosts and parallelism":
    "use_ray use_distributed_optimizer use_megatron_fsdp use_torch_fsdp2 use_tp_pp_dp_mapping use_*_dp_balance "
    "use_hyper_parallel hyper_parallel_args use_mca use_cpu *parallel_size sequence_parallel tp_comm_* *virtual_* "
    "decoder_*_pipeline_num_layers pipeline_model_parallel_layout custom_pipeline_* account_for_* batch_p2p_comm "
    "parallel.fsdp_plan.* parallel.tp_plan.* parallel.ep_plan.* ddp ddp_* fsdp fsdp_* fsdp_config.* zero_* "
    "deepspeed_autotp_size parallelism_config* align_* overlap_* distributed_* nccl_* local_rank node_rank "
    "machine_rank master_* main_process_* rdzv_* device device_map device_groups* world_size n_gpus ray_* "
    "resources_per_worker* placement_strategy data_parallel_* strict_fsdp_dtensor_load sharding_strategy "
    "offload_params ring_attn_func heads_k_stride cp_comm_type cp_partition_mode context_parallel_* "
    "seq_parallel_ring_type expert_parallel_* moe_token_dispatcher_type moe_enable_deepep moe_layer_recompute "
    "max_memory* gpu_memory_limit tp_config* dist_timeout ddp_timeout enable_ep_balance *.ep_balance_plan.* "
    "enable_fp8_comm local_rollout_* enable_encoder_hetero_dp num_to_*_prefetch reshard_* sharding_size "
    "*modules_to_wrap",
    "memory: caching, offload and recomputation":
    "use_reentrant* use_cache use_kv_cache use_train_metrics *recompute* *offload* gradient_checkpointing* "
    "activation_checkpoint* disable_gradient_checkpointing vit_gradient_checkpointing* *.swap_plan.* enable_chunk_mbs "
    "*.chunkmbs_plan.* *.chunkloss_plan.* chunk_size compute_mode torch_empty_cache_steps *gc_* gc_steps manual_gc "
    "empty_unused_memory_level low_cpu_mem_usage max_split_size_mb expandable_segments pin_memory "
    "optimizer_cuda_graph lora_on_cpu precompute_ref_log_probs layer_offloading experimental_skip_move_to_device",
    "kernels with the same numerics":
    "*_fusion use_fused_* use_flash_attn use_flash_attention_2 use_liger_kernel use_unsloth* use_kernels "
    "use_v1_kernels use_triton_* use_npu_fused_moe use_grouped_expert_matmul use_mcore_models use_scattermoe "
    "use_sonicmoe use_*_kernels use_logits_to_keep use_kt no_bias_* cross_entropy_* *_kernel *_kernels liger_* "
    "cut_cross_entropy unsloth_* flash_attn flash_attn_* flash_optimum attn_impl attn_layout attention_backend "
    "*_implementation experts_impl expert_backend is_causal transformer_impl no_persist_layer_norm te_rng_tracker "
    "moe_grouped_* moe_permute_fusion fused_qkv torch_compile* jit_mode_eval enable_fa_within_mla tiled_mlp* "
    "deepcompile flex_attn_* sdpa_varlen synchronize_per_layer tokenizer_use_* kt_* clip_grad_foreach allow_hf32 "
    "no_create_attention_mask_in_dataloader padding_free compile_config* flex_attn_compile_kwargs.* vit_attn_impl "
    "moe_router_fusion no_check_for_nan_in_loss_and_grad check_* deterministic_mode use_deter_comp full_determinism "
    "enable_full_determinism enable_experimental accumulate_allreduce_grads_in_fp32 patch.* model.patch.* "
    "lora_register_forward_hook training.plugin training.plugin.* mm_tool variable_seq_lengths moe_modules "
    "ignored_modules cpu_infer",
    "data loading: workers, caches, detected formats":
    "dataloader_* *num_workers *num_proc preprocessing_* overwrite_cache *cache_dir dataset_prepared_path "
    "dataset_processes dataset_num_proc dataset_keep_in_memory load_from_cache_file skip_prepare_dataset is_preprocess "
    "preprocess_iterable num_dataset_shards_to_save streaming_multipack_buffer_size lazy_* timeout prefetch_factor "
    "persistent_workers drop_last collate_fn* buffer_size packing_buffer_size data_seed shuffle_seed shuffle_algo "
    "shuffle_block_size num_canonical_nodes max_buffer_size data.dataloader_param.* data.dataset_param.attr.* "
    "*.message_* *.field_* *.roles.* *.roles task_encoder sft_dataset_config dataloader_type dataset_type "
    "sample_packing_* eval_sample_packing pad_to_sequence_len pad_to_multiple_of multipack_real_batches "
    "ignore_data_skip data_sharding tokenized_path preprocess_on_fly sequence_len_overflow dataset_metadata_path "
    "ds_type is_multimodal sft_num_preprocess_workers pretrain_multipack_* decoder_only_format max_leftover* "
    "length_column_name allow_pad_trimming pad_to_longest data_shared_file_system",
    "settings read from the model folder: class, layers, tokenizer, template":
    "template tool_format chat_template conv_* conversation agent_template use_chat_template template_backend "
    "tokenizer_* tokenizer.* hf_tokenizer_path hf_processor_path processor_* use_fast_tokenizer split_special_tokens "
    "padding_side trust_remote_code model_type model_id model_name model_author *model_spec special_tokens.pad_token "
    "*architectures base_model_config position_idx_func loss_func provider *_target_* defaults defaults.* version "
    "num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups kv_channels "
    "max_position_embeddings position_embedding_type use_rotary_* no_position_embedding rotary_* mrope_* swiglu "
    "normalization norm_epsilon untie_embeddings_and_output_weights disable_bias_linear add_*_bias add_bias_linear "
    "add_position_embedding qk_layernorm multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim v_head_dim "
    "qk_pos_emb_head_dim vocab_* padded_vocab_size make_vocab_size_divisible_by original_max_position_embeddings "
    "merge_file num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_* model.foundation.* "
    "model.image_encoder.* model.image_projector.* model.text_decoder.* model.audio_* model.video_* *_token_id "
    "compute_dtype model_max_length model_dtype vision_tower mm_projector mm_vision_select_* mm_use_im_* "
    "vision_resolution mpt_attn_impl fp8_model_name_or_path perform_initialization no_initialization "
    "use_cpu_initialization init_model_with_meta_device initialize_embedding data_parallel_random_init "
    "save_missing_weights apply_query_key_layer_scaling attention_softmax_in_fp32 convert_file skip_*_recompute "
    "moe_router_topk* moe_router_dtype moe_router_score_function moe_router_pre_softmax moe_router_num_groups "
    "moe_router_group_topk moe_router_enable_expert_bias init_method_std task_type tuner_backend "
    "source_model_max_length",
    "bitsandbytes, which FP8 codes replace":
    "bnb_* bnb_config_kwargs* quantization_method quantization_type double_quantization quantization_device_map "
    "double_quant quant_type quant_method qlora_sharded_model_loading",
    "settings of other phases":
    "ppo_* reward_model* ref_model_quantization_bit trl.vllm_* trl.use_vllm rollout_* ref_model_sync_*",
}  # fmt: skip
#: keys for which false is a meaningful value
_FALSE_IS_A_REQUEST = ("*shuffle",)
_OFF: tuple[Any, ...] = ("", "none", "null", "false", "off", "no")


def _compile_globs(names: str) -> re.Pattern[str]:
    return re.compile("|".join(fnmatch.translate(name) for name in names.split()))


_ALL_NAMES = " ".join(NO_EFFECT_ON_TRAINING.values()).split()
_FULL_KEY = _compile_globs(" ".join(name for name in _ALL_NAMES if "." in name))
_LAST_PART = _compile_globs(" ".join(name for name in _ALL_NAMES if "." not in name))
_REQUESTED_WHEN_FALSE = _compile_globs(" ".join(_FALSE_IS_A_REQUEST))


def is_lost(row: Row) -> bool:
    """Return whether a key affects training and has no certain translation. A key that is off, empty or 0
    requests nothing, unless a line of a script that was not evaluated may set it."""
    unsure = bool(row.source_key.unsure) and row.kind != "dead"
    if (row.kind not in ("none", "unknown") and not unsure) or not row.affects_training:
        return False
    key, value = row.source_key.key, row.source_key.value
    last = key.rpartition(".")[2]
    if not row.source_key.open and not unsure:
        if key.startswith("$"):
            return False
        if value in (None, [], {}) or (isinstance(value, str) and value.lower() in _OFF):
            return False
        if isinstance(value, bool | int | float) and not value and not _REQUESTED_WHEN_FALSE.match(last):
            return False
    return not (_LAST_PART.match(last) or _FULL_KEY.match(key))
