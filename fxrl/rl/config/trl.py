"""TRL's names for what a configuration says: ``GRPOConfig``'s and ``TrainingArguments``' fields.

Each is a key by another name, or is answered with what there is instead, so that nobody who comes
from there is left with "no such key".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

KEYS: Mapping[str, str] = MappingProxyType(
    {
        # GRPOTrainer's arguments and ModelConfig
        "model": "model.id",
        "model_name_or_path": "model.id",
        "torch_dtype": "model.dtype",
        "teacher_model": "teacher.id",
        "teacher_model_name_or_path": "teacher.id",
        "use_peft": "model.lora",
        "peft_config": "model.lora",
        "lora_r": "model.lora.r",
        "lora_alpha": "model.lora.alpha",
        "lora_dropout": "model.lora.dropout",
        "lora_target_modules": "model.lora.targets",
        "train_dataset": "data.dataset",
        "dataset_name": "data.dataset",
        "dataset_config": "data.subset",
        "dataset_train_split": "data.split",
        "max_prompt_length": "data.max_prompt_tokens",
        "shuffle_dataset": "data.shuffle",
        "max_length": "data.max_length",
        "completion_only_loss": "data.train_on",
        "assistant_only_loss": "data.train_on",
        "chat_template_kwargs": "data.chat_template_kwargs",
        "reward_funcs": "reward.functions",
        "reward_weights": "reward.weights",
        # GRPOConfig
        "max_completion_length": "sampling.max_tokens",
        "max_new_tokens": "sampling.max_tokens",
        "num_generations": "sampling.num_generations",
        "temperature": "sampling.temperature",
        "top_p": "sampling.top_p",
        "top_k": "sampling.top_k",
        "min_p": "sampling.min_p",
        "generation_kwargs": "sampling.extra",
        "vllm_max_model_length": "vllm.max_model_len",
        "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
        "vllm_server_timeout": "vllm.generate_timeout_s",
        "tools": "rollout.tools",
        "environment_factory": "rollout.environment_factory",
        "rollout_func": "rollout.rollout_func",
        "max_tool_calling_iterations": "rollout.max_tool_calling_iterations",
        "num_iterations": "num_iterations",
        "precompute_ref_log_probs": "precompute_ref_log_probs",
        "mask_truncated_completions": "mask_truncated_completions",
        "scale_rewards": "scale_rewards",
        "loss_type": "loss.name",
        "beta": "loss.beta",
        "epsilon": "loss.epsilon",
        "epsilon_high": "loss.epsilon_high",
        "delta": "loss.delta",
        "sapo_temperature_neg": "loss.sapo_temperature_neg",
        "sapo_temperature_pos": "loss.sapo_temperature_pos",
        "importance_sampling_level": "loss.importance_sampling_level",
        "top_entropy_quantile": "loss.top_entropy_quantile",
        "entropy_coef": "loss.entropy_coef",
        "off_policy_mask_threshold": "loss.off_policy_mask_threshold",
        "use_bias_correction_kl": "loss.use_bias_correction_kl",
        "vllm_importance_sampling_correction": "loss.vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode": "loss.vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_max": "loss.vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min": "loss.vllm_importance_sampling_clip_min",
        "vllm_importance_sampling_cap": "loss.vllm_importance_sampling_clip_max",
        "label_smoothing": "loss.label_smoothing",
        "center_rewards_coefficient": "loss.center_rewards_coefficient",
        "reference_free": "loss.reference_free",
        # PPOConfig
        "num_ppo_epochs": "num_iterations",
        "cliprange": "loss.epsilon",
        "cliprange_value": "loss.cliprange_value",
        "vf_coef": "loss.vf_coef",
        "gamma": "loss.gamma",
        "lam": "loss.lam",
        "kl_coef": "loss.kl_coef",
        "log_completions": "log_completions",
        "num_completions_to_print": "log_completions",
        # TrainingArguments
        "output_dir": "run_dir",
        "num_train_epochs": "epochs",
        "max_steps": "steps",
        "learning_rate": "optim.lr",
        "lr": "optim.lr",
        "lr_scheduler_type": "optim.schedule",
        "scheduler": "optim.schedule",
        "warmup_steps": "optim.warmup_steps",
        "optim": "optim.name",
        "optimizer": "optim.name",
        "weight_decay": "optim.weight_decay",
        "adam_epsilon": "optim.eps",
        "max_grad_norm": "optim.max_grad_norm",
        "gradient_checkpointing": "model.gradient_checkpointing",
        "activation_checkpointing": "model.gradient_checkpointing",
        "seed": "seed",
        "data_seed": "data.seed",
        "save_steps": "save_every",
        "save_total_limit": "keep_checkpoints",
        "eval_dataset": "eval.dataset",
        "dataset_test_split": "eval.split",
        "eval_steps": "eval.every",
        "per_device_eval_batch_size": "eval.batch",
        "report_to": "log_to",
        "project": "project",
        "hub_model_id": "push_to_hub",
        "push_to_hub": "push_to_hub",
        "hub_strategy": "hub_strategy",
    }
)
"""TRL's name -> the key that means the same."""

_RANKS = "torchrun --nproc-per-node N -m fxrl train shares a step among N GPUs; see its --help"
_BATCH = (
    "prompts_per_step counts a step's prompts (TRL's batch, accumulated, over num_generations), "
    "and micro_batch_tokens the tokens of one forward pass"
)
_FUSED = "fxrl.optimize fuses the loss head and compiles by itself; [fxrl] sets it up"
_DTYPE = "model.dtype is the weights' and model.autocast the matrix products'"
_IN_PROCESS = "vLLM runs in this process over the same weights; [vllm] sets it up"
_VESPO = "there is no VESPO loss; loss.name is one of fxrl.losses, or module:function"
_ADAPTIVE = "the entropy bonus is constant: loss.entropy_coef"
_REFERENCE = "the reference policy stays the one that training began with"
_BY_STEPS = "it is by steps: save_every, eval.every; each step is logged; 0 is never"
_EVERY_STEP = "each step is logged: metrics.jsonl, and where log_to says"
_LOADER = "rows are in memory and there is no DataLoader; data.shuffle orders them"
_DROPPED = "all columns reach the rewards; the model gets the prompt's tokens alone"
_COMMAND = "fxrl train CONFIG.toml trains, and evaluates as [eval] says"
_WORDS = "--json gives lines for tools; a terminal gets a live view"
_EVAL = (
    "[eval] size holds questions out or dataset gives them, every says when, greedy how; see "
    "examples/config.md"
)
_TRACKIO = "log_to = ['trackio'] with project; trackio's own environment variables say where"
_HUB = "the repository keeps its own settings: create it first (hf repo create); hf auth login"
_BEST = "the newest keep_checkpoints are kept; metrics.jsonl tells which step was best"
_DETERMINISM = "a seed makes a run repeatable on one machine"
_QUANTIZED = "weights are trained and loaded as model.dtype, never quantized"
_DROPOUT = "model.lora.dropout is the adapter's; the model's own dropout is its config's"

INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        # batches and devices
        "per_device_train_batch_size": _BATCH,
        "train_batch_size": _BATCH,
        "batch_size": _BATCH,
        "gradient_accumulation_steps": _BATCH,
        "generation_batch_size": _BATCH,
        "steps_per_generation": "num_iterations updates are made on a step's completions",
        "auto_find_batch_size": "micro_batch_tokens bounds a forward pass, and fxrl plans its "
        "memory",
        "average_tokens_across_devices": _RANKS,
        "deepspeed": _RANKS + "; layers are kept, offloaded or run again as fxrl.gpu_memory says",
        "fsdp": _RANKS + "; layers are kept, offloaded or run again as fxrl.gpu_memory says",
        "fsdp_config": _RANKS,
        "accelerator_config": _RANKS,
        "parallelism_config": _RANKS,
        "ds3_gather_for_generation": _RANKS,
        "ddp_find_unused_parameters": _RANKS,
        "ddp_bucket_cap_mb": _RANKS,
        "ddp_broadcast_buffers": _RANKS,
        "ddp_static_graph": _RANKS,
        "ddp_backend": _RANKS,
        "ddp_timeout": _RANKS,
        "local_rank": _RANKS,
        "use_cpu": "model.device = 'cpu'",
        # model
        "model_init_kwargs": "[model] has id, dtype, device and lora; config.json has the rest",
        "trust_remote_code": "a model's own code is never run; transformers' models are",
        "attn_implementation": "the model's config.json chooses it",
        "router_aux_loss_coef": "write it into a loss of your own: loss.name = 'module:function'",
        "load_in_4bit": _QUANTIZED,
        "load_in_8bit": _QUANTIZED,
        "disable_dropout": _DROPOUT,
        "cast_lm_head_to_fp32": "the fused loss head computes in float32 as it is",
        "neftune_noise_alpha": "write it into a loss of your own: loss.name = 'module:function'",
        "bf16": _DTYPE,
        "fp16": _DTYPE,
        "bf16_full_eval": _DTYPE,
        "fp16_full_eval": _DTYPE,
        "tf32": "what torch is set to stands",
        "gradient_checkpointing_kwargs": "model.gradient_checkpointing alone; fxrl takes it over",
        "activation_checkpointing_kwargs": "model.gradient_checkpointing alone; fxrl takes it over",
        "torch_compile": _FUSED,
        "torch_compile_backend": _FUSED,
        "torch_compile_mode": _FUSED,
        "use_liger_kernel": _FUSED,
        "liger_kernel_config": _FUSED,
        "use_cache": "generation caches keys and values, training does not",
        "torch_empty_cache_steps": "fxrl plans the memory; fxrl.gpu_memory bounds it",
        "pad_to_multiple_of": "micro-batches are packed by length: micro_batch_tokens",
        # rollouts
        "use_vllm": "engine = 'vllm'",
        "vllm_mode": _IN_PROCESS,
        "vllm_model_impl": "vllm.engine_args = { model_impl = ... }",
        "vllm_enable_sleep_mode": "vllm.standby, which is on",
        "vllm_structured_outputs_regex": "sampling.extra = { structured_outputs = ... }",
        "vllm_server_base_url": _IN_PROCESS,
        "vllm_server_host": _IN_PROCESS,
        "vllm_server_port": _IN_PROCESS,
        "vllm_group_port": _IN_PROCESS,
        "vllm_gpu_memory_utilization": "vllm.gpu_memory in bytes or as '75GiB'; what is free by "
        "default",
        "repetition_penalty": "sampling.extra = { repetition_penalty = ... } with engine = 'vllm'",
        "cache_implementation": "the embedded engine has one KV cache; engine = 'vllm' pages its",
        "use_transformers_continuous_batching": "engine = 'vllm' batches continuously",
        "transformers_continuous_batching_config": "engine = 'vllm' batches continuously",
        "use_transformers_paged": "engine = 'vllm' pages its KV cache",
        "num_generations_eval": "an evaluation draws one completion a question, greedy by default",
        # loss
        "vespo_k_pos": _VESPO,
        "vespo_lambda_pos": _VESPO,
        "vespo_k_neg": _VESPO,
        "vespo_lambda_neg": _VESPO,
        "multi_objective_aggregation": "rewards are summed by reward.weights, then scaled as "
        "scale_rewards says",
        "precompute_ref_batch_size": _BATCH,
        "sync_ref_model": _REFERENCE,
        "ref_model_mixup_alpha": _REFERENCE,
        "ref_model_sync_steps": _REFERENCE,
        "use_adaptive_entropy": _ADAPTIVE,
        "entropy_coef_min": _ADAPTIVE,
        "entropy_coef_max": _ADAPTIVE,
        "entropy_coef_delta": _ADAPTIVE,
        "entropy_target": _ADAPTIVE,
        "label_smoothing_factor": "there are no labels; loss.name = 'module:function' is your own",
        # optimizer
        "optim_args": "further keys of [optim] go to the optimizer of torch.optim",
        "adam_beta1": "optim.betas = [0.9, 0.999]",
        "adam_beta2": "optim.betas = [0.9, 0.999]",
        "optim_target_modules": "model.lora.targets names what is trained",
        "lr_scheduler_kwargs": "optim.schedule and optim.warmup_steps are all",
        "warmup_ratio": "optim.warmup_steps, in updates",
        # logging, evaluation, checkpoints
        "log_multimodal": "prompts are text",
        "log_unique_prompts": "log_completions samples are spread over the step's prompts",
        "log_completions_hub_repo": "completions.jsonl in run_dir has them",
        "logging_strategy": _BY_STEPS,
        "logging_steps": _EVERY_STEP,
        "logging_first_step": _EVERY_STEP,
        "logging_dir": "run_dir/tensorboard",
        "log_on_each_node": _RANKS,
        "logging_nan_inf_filter": "a number that is not finite is null in metrics.jsonl; "
        "max_nonfinite stops the run",
        "include_num_input_tokens_seen": "num_tokens is in every line of metrics.jsonl",
        "log_level": _WORDS,
        "log_level_replica": _WORDS,
        "disable_tqdm": _WORDS,
        "run_name": "the run has the name of run_dir's last part",
        "trackio_space_id": _TRACKIO,
        "trackio_bucket_id": _TRACKIO,
        "trackio_static_space_id": _TRACKIO,
        "eval_strategy": _BY_STEPS,
        "save_strategy": _BY_STEPS,
        "eval_delay": _EVAL,
        "eval_on_start": "with held-out questions an evaluation goes before the first step",
        "prediction_loss_only": _EVAL,
        "eval_do_concat_batches": _EVAL,
        "eval_use_gather_object": _EVAL,
        "eval_accumulation_steps": _EVAL,
        "include_for_metrics": _EVAL,
        "batch_eval_metrics": _EVAL,
        "save_only_model": "a checkpoint has all that a run goes on from; final/ is the model",
        "save_on_each_node": _RANKS,
        "enable_jit_checkpoint": "SIGTERM saves a checkpoint after the step that runs",
        "load_best_model_at_end": _BEST,
        "metric_for_best_model": _BEST,
        "greater_is_better": _BEST,
        "resume_from_checkpoint": "fxrl train CONFIG.toml --resume [DIR]",
        "ignore_data_skip": "a resumed run goes on at its place in the data",
        "restore_callback_states_from_checkpoint": "a callback keeps its own state",
        "full_determinism": _DETERMINISM,
        "hub_token": _HUB,
        "hub_private_repo": _HUB,
        "hub_revision": _HUB,
        "hub_always_push": "hub_strategy = 'every_save' waits for each push",
        # data
        "remove_unused_columns": _DROPPED,
        "label_names": _DROPPED,
        "dataloader_drop_last": _LOADER,
        "dataloader_num_workers": _LOADER,
        "dataloader_pin_memory": _LOADER,
        "dataloader_persistent_workers": _LOADER,
        "dataloader_prefetch_factor": _LOADER,
        "dataloader_multiprocessing_context": _LOADER,
        "dataloader_in_order": _LOADER,
        "train_sampling_strategy": _LOADER,
        "length_column_name": _LOADER,
        # the script
        "debug": "fxrl verify and fxrl dump show what was rewritten",
        "skip_memory_metrics": "memory/peak_bytes is in metrics.jsonl on a GPU",
        "do_train": _COMMAND,
        "do_eval": _COMMAND,
        "do_predict": _COMMAND,
    }
)
"""TRL's name -> what does that here, or why there is none."""
