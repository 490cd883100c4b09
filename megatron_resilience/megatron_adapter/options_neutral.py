"""The options of Megatron 0.19 that need no care, by the parser's groups. See ``options``.

Here are: sizes and numerics of the model, learning rates, file names, what only acts together with an
option that is refused (FSDP's, RL's, inference's, offloading's), and what only other scripts read (vision,
biencoder). Names are argparse destinations.
"""

from __future__ import annotations

_GROUPS: dict[str, str] = {
    "transformer configuration": """
        perform_initialization use_cpu_initialization deterministic_mode tp_comm_bulk_wgrad
        tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
        tp_comm_split_ag tp_comm_split_rs cross_entropy_loss_fusion cross_entropy_fusion_impl
        tp_comm_bootstrap_backend ep_overlap_early_attn_memory_release wgrad_deferral_limit
        microbatch_group_size_per_vp_stage mtp_standalone cpu_offloading_retain_pinned_cpu_buffers
        num_layers mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads
        mtp_hybrid_override_pattern account_for_embedding_in_pipeline_split
        account_for_loss_in_pipeline_split hidden_size num_attention_heads attention_backend
        flash_attention_version softmax_type num_query_groups ffn_hidden_size kv_channels
        fp32_residual_connection apply_residual_connection_post_layernorm layernorm_epsilon
        layernorm_zero_centered_gamma add_bias_linear add_qkv_bias glu_linear_offset
        activation_func_clamp_value rotary_interleaved normalization qk_layernorm qk_l2_norm
        qk_clip_alpha qk_clip_threshold attention_output_gate calculate_per_token_loss
        multi_latent_attention dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
        dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff
        dsa_indexer_use_sparse_loss dsa_kernel_backend dsa_indexer_rope_interleaved
        dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon
        dsa_indexer_k_norm_fp32 linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
        linear_num_key_heads linear_num_value_heads init_method_std embedding_init_method_std use_mup
        mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim
        mup_attn_scale_power apply_query_key_layer_scaling disable_bf16_reduced_precision_matmul
        use_fused_weighted_squared_relu fused_residual_rmsnorm use_transformer_engine_op_fuser
        recompute_method recompute_num_layers distribute_saved_activations recompute_modules fp8_recipe
        fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo
        fp8_wgrad fp8_output_proj first_last_layers_bf16 num_layers_at_start_in_bf16
        num_layers_at_end_in_bf16 kitchen_attention_backend fp4_recipe fp4_quantizer_factory
        high_priority_a2a_comm_stream moe_shared_expert_intermediate_size moe_shared_expert_gate
        use_grouped_gemm_for_shared_expert moe_shared_expert_glu_interleave_size moe_ffn_hidden_size
        moe_router_topk moe_router_padding_for_quantization moe_router_padding_for_fp8
        moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
        moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype
        moe_router_bias_update_rate moe_router_force_load_balancing moe_router_force_biased
        use_grouped_gemm_for_dense_mlp moe_grouped_gemm moe_single_grouped_weight
        moe_single_grouped_bias moe_z_loss_coeff moe_input_jitter_eps moe_flex_dispatcher_backend
        moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs moe_per_layer_logging
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity
        moe_pad_experts_for_cuda_graph_inference moe_token_drop_policy moe_layer_recompute
        moe_permute_fusion moe_router_fusion moe_apply_probs_on_input moe_latent_size
        moe_flex_dispatcher_num_sms moe_deepep_num_sms moe_hybridep_num_sms
        moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
        moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape moe_ncclep_zero_copy
        moe_mlp_glu_interleave_size moe_expert_rank_capacity_factor cuda_graph_warmup_steps
        inference_cuda_graph_scope clone_scatter_output_in_embedding config_logger_dir flash_decode
        batch_invariant_mode use_te_activation_func nccl_all_reduce_for_prefill
        inference_fuse_tp_communication inference_disable_triton_nvls_kernels
        inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
        inference_moe_token_dispatcher_type mrope_section mamba_state_dim mamba_head_dim
        mamba_num_groups mamba_num_heads use_mamba_mem_eff_path mlp_chunks_for_prefill
        mlp_chunks_for_training offload_modules min_offloaded_tensor_size delay_offload_until_cuda_graph
        delta_offload_bytes_across_pp_ranks activation_offload_fraction moe_paged_stash_page_size
        moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu
        fine_grained_offloading_max_inflight_offloads
    """,
    "network size": """
        encoder_num_layers decoder_num_layers group_query_attention window_size window_attn_skip_freq
        max_position_embeddings position_embedding_type yarn_original_max_position_embeddings
        yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int relative_attention_num_buckets
        relative_attention_max_distance use_rotary_position_embeddings rotary_base rotary_percent
        rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor no_rope_freq
        add_position_embedding make_vocab_size_divisible_by openai_gelu squared_relu swiglu quick_geglu
        onnx_safe bert_binary_head
    """,
    "regularization": """
        weight_decay apply_wd_to_qk_layernorm clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum
        muon_momentum muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec
        muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_extra_scale_factor
        muon_scalar_optimizer lion_beta1 lion_beta2 no_weight_decay_cond_type
    """,
    "profiling": """
        profile_step_start profile_step_end pytorch_profiler_collect_shapes
        pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra profile_ranks
        memory_snapshot_path record_shapes nvtx_ranges
    """,
    "training": """
        micro_batch_size global_batch_size empty_unused_memory_level
        check_weight_hash_across_dp_replicas_interval train_sync_interval train_iters train_samples
        exit_interval exit_duration_in_mins exit_signal exit_signal_handler_for_dataloader manual_gc
        manual_gc_interval manual_gc_eval iterations_to_skip batch_size recompute_activations
        check_for_nan_in_loss_and_grad result_rejected_tracker_filename
        tp_comm_overlap_cfg checkpoint_activations masked_softmax_fusion bias_gelu_fusion
        bias_swiglu_fusion bias_dropout_fusion apply_rope_fusion rope_type use_flash_attn
        optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d
        dump_param_to_param_group_map pin_cpu_grads pin_cpu_params no_persist_layer_norm
        gradient_accumulation_fusion deprecated_use_mcore_models
    """,
    "rl": """
        rl_prompts_per_eval grpo_prompts_per_step grpo_group_size rl_generation_lag
        rl_submission_granularity rl_consumption_granularity grpo_iterations grpo_clamp_eps_lower
        grpo_clamp_eps_upper grpo_kl_beta grpo_entropy_term_weight grpo_filter_groups_with_same_reward
        langrl_env_config rl_default_temperature rl_default_top_p rl_default_top_k
        rl_offload_optimizer_during_inference rl_kv_cache_management_mode rl_persist_cuda_graphs
        rl_partial_rollouts rl_inference_logprobs_is_correction rl_importance_sampling_truncation_coef
        rl_use_sequence_packing rl_sequence_packing_max_sequences_per_bin rl_sequence_packing_algo
        rl_training_cuda_graphs rl_inference_tensor_model_parallel_size
        rl_inference_pipeline_model_parallel_size rl_inference_expert_model_parallel_size
        rl_inference_expert_tensor_model_parallel_size rl_inference_model_unified_memory_level
        rl_offload_inference_model_weights_when_idle refit_method rl_verify_model_weights_swap
        rl_skip_bos_token rl_profile rl_profile_dir rl_inference_parsers
    """,
    "RNG and initialization": """
        seed data_parallel_random_init init_method_xavier_uniform
    """,
    "learning rate and weight decay": """
        lr_decay_style lr_wsd_decay_style lr_decay_iters lr_decay_samples lr_wsd_decay_iters
        lr_wsd_decay_samples lr_warmup_fraction lr_warmup_iters lr_warmup_samples lr_warmup_init
        override_opt_param_scheduler use_checkpoint_opt_param_scheduler start_weight_decay
        end_weight_decay weight_decay_incr_style lr warmup min_lr decoupled_lr decoupled_min_lr
    """,
    "checkpointing": """
        save save_interval save_params_interval save_retain_interval load_main_params_from_ckpt
        non_persistent_save_interval non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir
        non_persistent_local_ckpt_algo finetune pretrained_checkpoint ckpt_step use_checkpoint_args
        use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args
        exit_on_missing_checkpoint auto_detect_ckpt_format ckpt_convert_save
        ckpt_convert_update_legacy_dist_opt_format ckpt_fully_parallel_save async_strategy
        async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm ckpt_fully_parallel_load
        ckpt_fully_parallel_load_exchange_algo ckpt_fully_parallel_save_process_group
        ckpt_fully_parallel_load_process_group ckpt_load_validate_sharding_integrity
        strict_fsdp_dtensor_load dist_ckpt_strictness dist_ckpt_save_pre_mcore_014
        dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient replication_jump
        replication_factor verify_integrity stream_ckpt_dequant no_save_optim no_save_rng no_load_optim
        no_load_rng override_ckpt_iteration use_dist_ckpt_deprecated dist_ckpt_format_deprecated
        dist_ckpt_workers ckpt_fully_parallel_save_deprecated
    """,
    "mixed precision": """
        grad_reduce_in_bf16 loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis
        attention_softmax_in_fp32 fp16_lm_cross_entropy mamba_training_ssm_states_dtype
    """,
    "distributed init": """
        distributed_backend distributed_timeout_minutes local_rank use_gloo_process_groups
        sharp_enabled_group flight_recorder_dump_path flight_recorder_trace_buffer_size
        flight_recorder_dump_on_timeout flight_recorder_include_stack_trace
        flight_recorder_include_only_active flight_recorder_extra_dump_on_exec disable_jit_fuser
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        pipeline_model_parallel_layout model_parallel_size num_layers_per_virtual_pipeline_stage
        overlap_p2p_comm ddp_pad_buckets_for_high_nccl_busbw ddp_average_in_collective
        align_param_gather use_layer_wise_param_layout disable_symmetric_registration
        fsdp_manual_registration data_parallel_sharding_strategy outer_dp_sharding_strategy
        gradient_reduce_div_fusion fsdp_double_buffer suggested_communication_unit_size
        keep_fp8_transpose_cache enable_full_sharding_in_hsdp torch_fsdp2_reshard_after_forward
        cp_comm_type
    """,
    "validation": """
        eval_iters eval_interval start_eval_at_iter eval_global_batch_size eval_micro_batch_size
        skip_train test_mode validation_set_names
    """,
    "data and dataloader": """
        data_path split train_data_path valid_data_path test_data_path data_args_path
        per_split_data_args_path per_dataset_sequences_path dataloader_fast_cache_load
        dataloader_defer_npy_index_mmap data_cache_path mmap_bin_files mock_data seq_length
        encoder_seq_length decoder_seq_length sample_rate mask_prob short_seq_prob num_workers
        reset_position_ids reset_attention_mask dataloader_inter_document_masking eod_mask_loss
        create_attention_mask_in_dataloader num_dataset_builder_threads object_storage_cache_path
        mid_level_dataset_surplus allow_ambiguous_pad_tokens fim_rate fim_spm_rate
        fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token
        fim_suffix_token fim_pad_token fim_eod_token
    """,
    "tokenizer": """
        vocab_size padded_vocab_size pad_vocab_size vocab_file merge_file vocab_extra_ids tokenizer_type
        tokenizer_model metadata_path special_tokens tiktoken_pattern tiktoken_num_special_tokens
        tokenizer_sentencepiece_legacy tokenizer_sentencepiece_ignore_extra_whitespaces
        tokenizer_hf_no_use_fast tokenizer_hf_no_include_special_tokens trust_remote_code
        null_tokenizer_eod_id null_tokenizer_pad_id chat_template
    """,
    "autoresume": """
        adlr_autoresume_interval
    """,
    "biencoder": """
        ict_head_size biencoder_projection_dim biencoder_shared_query_context_model ict_load bert_load
        titles_data_path query_in_block_prob use_one_sent_docs evidence_data_path
        retriever_report_topk_accuracies retriever_score_scaling block_data_path embedding_path
        indexer_batch_size indexer_log_interval
    """,
    "vision": """
        num_classes img_h img_w num_channels patch_dim classes_fraction data_per_class_fraction
        data_sharding head_lr_mult vision_pretraining vision_backbone_type swin_backbone_type mask_type
        mask_factor iter_per_epoch dino_local_img_size dino_local_crops_number dino_head_hidden_size
        dino_bottleneck_size dino_freeze_last_layer dino_norm_last_layer dino_warmup_teacher_temp
        dino_teacher_temp dino_warmup_teacher_temp_epochs
    """,
    "moe": """
        moe_layer_freq moe_aux_loss_coeff moe_upcycling_granularity
    """,
    "mla": """
        q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_scaling_factor mscale
        mscale_all_dim cache_mla_latents mla_down_proj_fusion
    """,
    "experimental_attention_variant": """
        linear_attention_freq
    """,
    "logging": """
        log_interval log_params_norm log_throughput log_progress timing_log_level timing_log_option
        tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard
        log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard log_memory_to_tensorboard
        log_memory_interval log_device_memory_used log_num_zeros_in_grad barrier_with_L1_time
        log_world_size_to_tensorboard wandb_exp_name wandb_save_dir wandb_entity logging_level
        moe_routing_trace_max_training_iters moe_routing_trace_capture_logits
        moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights
    """,
    "Logits Distillation": """
        logits_save_top_k logits_save_top_p logits_save_top_p_min_k logits_save_dtype
        logits_load_decode_threads logits_load_prefetch_factor logits_load_msc_prefetch_depth
        logits_load_kd_loss_alpha logits_load_ignore_errors
    """,
    "straggler": """
        straggler_ctrlr_port straggler_minmax_count disable_straggler_on_startup
    """,
    "inference": """
        inference_batch_times_seqlen_threshold max_tokens_to_oom output_bert_embeddings
        bert_embedder_type cuda_graph_modules use_legacy_static_engine inference_max_requests
        inference_max_seq_length inference_dynamic_batching inference_dynamic_batching_buffer_size_gb
        inference_dynamic_batching_paused_buffer_size_gb inference_dynamic_batching_mamba_memory_ratio
        inference_dynamic_batching_block_size inference_dynamic_batching_max_requests
        inference_dynamic_batching_max_tokens inference_dynamic_batching_num_cuda_graphs
        inference_dynamic_batching_track_paused_request_events
        inference_dynamic_batching_track_generated_token_events decode_only_cuda_graphs
        inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens
        inference_dynamic_batching_unified_memory_level enable_chunked_prefill num_speculative_tokens
        inference_dynamic_batching_enable_prefix_caching
        inference_dynamic_batching_prefix_caching_eviction_policy
        inference_dynamic_batching_prefix_caching_coordinator_policy
        inference_dynamic_batching_prefix_caching_routing_alpha
        inference_dynamic_batching_prefix_caching_mamba_gb
        inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution
        inference_dynamic_batching_sampling_backend offset_sampling_seed_by_dp_rank
        inference_dynamic_batching_async_sched_mode inference_dynamic_batching_logprobs_mode
        inference_logging_step_interval inference_text_gen_server_logging inference_wandb_logging
        inference_coordinator_port mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype
        inference_use_synchronous_zmq_collectives inference_disable_ep_consensus inference_shards
    """,
    "experimental": """
        enable_experimental main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype
        megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype
        megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer
        fsdp_db_use_persist_buf_on_alloc_fail
    """,
    "one logger": """
        enable_one_logger one_logger_project one_logger_run_name one_logger_async app_tag_run_name
        app_tag_run_version
    """,
    "In-process restart": """
        inprocess_max_iterations inprocess_monitor_thread_interval inprocess_monitor_process_interval
        inprocess_progress_watchdog_interval inprocess_heartbeat_interval inprocess_soft_timeout
        inprocess_hard_timeout inprocess_heartbeat_timeout inprocess_barrier_timeout
        inprocess_completion_timeout inprocess_last_call_wait inprocess_termination_grace_time
        inprocess_granularity inprocess_active_world_size inprocess_empty_cuda_cache
    """,
    "ft_package": """
        calc_ft_timeouts ft_num_warmup_iters
    """,
    "rerun engine": """
        error_injection_type
    """,
    "msc": """
        enable_msc disable_msc_deprecated
    """,
    "sft": """
        sft_tokenizer_prompt_format
    """,
    "fault injector": """
        fault_injector_fault_types fault_injector_fault_probabilities fault_injector_fault_delay
        fault_injector_delay_start_iteration fault_injector_mtti_seconds fault_injector_offset_seconds
        fault_injector_seed
    """,
}

NEUTRAL = frozenset(name for names in _GROUPS.values() for name in names.split())
"""By argparse destination."""
