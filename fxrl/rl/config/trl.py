"""TRL's names for what a configuration says: ``GRPOConfig``'s and ``TrainingArguments``' fields.

Each is a key by another name, or is answered with what there is instead, so that nobody who comes
from there is left with "no such key".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ALIKE = """
    data.max_length data.chat_template_kwargs
    sampling.num_generations sampling.temperature sampling.top_p sampling.top_k sampling.min_p
    rollout.tools rollout.environment_factory rollout.rollout_func
    rollout.max_tool_calling_iterations
    num_iterations precompute_ref_log_probs mask_truncated_completions scale_rewards
    log_completions seed project push_to_hub hub_strategy
    loss.beta loss.epsilon loss.epsilon_high loss.delta loss.sapo_temperature_neg
    loss.sapo_temperature_pos loss.importance_sampling_level loss.top_entropy_quantile
    loss.entropy_coef loss.off_policy_mask_threshold loss.use_bias_correction_kl
    loss.vllm_importance_sampling_correction loss.vllm_importance_sampling_mode
    loss.vllm_importance_sampling_clip_max loss.vllm_importance_sampling_clip_min
    loss.label_smoothing loss.center_rewards_coefficient loss.reference_free loss.cliprange_value
    loss.vf_coef loss.gamma loss.lam loss.kl_coef
    optim.lr optim.warmup_steps optim.weight_decay optim.max_grad_norm
    model.gradient_checkpointing
"""
"""Keys whose last part is TRL's name."""

_OTHER = {
    "model.id": "model model_name_or_path",
    "model.dtype": "torch_dtype",
    "teacher.id": "teacher_model teacher_model_name_or_path",
    "model.lora": "use_peft peft_config",
    "model.lora.r": "lora_r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.targets": "lora_target_modules",
    "data.dataset": "train_dataset dataset_name",
    "data.subset": "dataset_config",
    "data.split": "dataset_train_split",
    "data.max_prompt_tokens": "max_prompt_length",
    "data.shuffle": "shuffle_dataset",
    "data.train_on": "completion_only_loss assistant_only_loss",
    "reward.functions": "reward_funcs",
    "reward.weights": "reward_weights",
    "sampling.num_generations": "n",
    "sampling.max_tokens": "max_completion_length max_new_tokens",
    "sampling.extra": "generation_kwargs",
    "vllm.max_model_len": "vllm_max_model_length",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
    "vllm.generate_timeout_s": "vllm_server_timeout",
    "num_iterations": "num_ppo_epochs",
    "loss.name": "loss_type",
    "loss.epsilon": "cliprange",
    "loss.vllm_importance_sampling_clip_max": "vllm_importance_sampling_cap",
    "log_completions": "num_completions_to_print",
    "run_dir": "output_dir",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "optim.lr": "learning_rate",
    "optim.schedule": "lr_scheduler_type scheduler",
    "optim.name": "optim optimizer",
    "optim.eps": "adam_epsilon",
    "model.gradient_checkpointing": "activation_checkpointing",
    "data.seed": "data_seed",
    "save_every": "save_steps",
    "keep_checkpoints": "save_total_limit",
    "eval.dataset": "eval_dataset",
    "eval.split": "dataset_test_split",
    "eval.every": "eval_steps",
    "eval.batch": "per_device_eval_batch_size",
    "log_to": "report_to",
    "push_to_hub": "hub_model_id",
}
"""Keys and TRL's names for them."""

KEYS: Mapping[str, str] = MappingProxyType(
    {key.rpartition(".")[2]: key for key in _ALIKE.split()}
    | {name: key for key, names in _OTHER.items() for name in names.split()}
)
"""TRL's name -> the key that means the same."""

_ANSWERS = {
    "prompts_per_step counts a step's prompts (TRL's batch, accumulated, over "
    "num_generations), and micro_batch_tokens the tokens of one forward pass": (
        "per_device_train_batch_size train_batch_size batch_size precompute_ref_batch_size "
        "gradient_accumulation_steps generation_batch_size"
    ),
    "num_iterations updates are made on a step's completions": "steps_per_generation",
    "micro_batch_tokens bounds a forward pass, and fxrl plans its memory": "auto_find_batch_size",
    "torchrun --nproc-per-node N -m fxrl train shares a step among N GPUs; see its --help": (
        "average_tokens_across_devices fsdp_config accelerator_config parallelism_config "
        "ds3_gather_for_generation ddp_find_unused_parameters ddp_bucket_cap_mb "
        "ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout local_rank "
        "log_on_each_node save_on_each_node"
    ),
    "torchrun --nproc-per-node N -m fxrl train shares a step among N GPUs; see its --help; "
    "model.sharded shares frozen weights out; layers are kept, offloaded or run again as "
    "fxrl.gpu_memory says": "deepspeed fsdp",
    "model.device = 'cpu'": "use_cpu",
    "[model] has id, dtype, device and lora; config.json has the rest": "model_init_kwargs",
    "a model's own code is never run; transformers' models are": "trust_remote_code",
    "the model's config.json chooses it": "attn_implementation",
    "write it into a loss of your own: loss.name = 'module:function'": (
        "router_aux_loss_coef neftune_noise_alpha"
    ),
    "model.quantization = 'nf4', 'int4' or 'fp8' holds the weights under an adapter in so few "
    "bits": "load_in_4bit load_in_8bit",
    "model.lora.dropout is the adapter's; the model's own dropout is its config's": (
        "disable_dropout"
    ),
    "the fused loss head computes in float32 as it is": "cast_lm_head_to_fp32",
    "model.dtype is the weights' and model.autocast the matrix products'": (
        "bf16 fp16 bf16_full_eval fp16_full_eval"
    ),
    "what torch is set to stands": "tf32",
    "model.gradient_checkpointing alone; fxrl takes it over": (
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs"
    ),
    "fxrl.optimize fuses the loss head and compiles by itself; [fxrl] sets it up": (
        "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel "
        "liger_kernel_config"
    ),
    "generation caches keys and values, training does not": "use_cache",
    "fxrl plans the memory; fxrl.gpu_memory bounds it": "torch_empty_cache_steps",
    "micro-batches are packed by length: micro_batch_tokens": "pad_to_multiple_of",
    "engine = 'vllm'": "use_vllm",
    "vLLM runs in this process over the same weights; [vllm] sets it up": (
        "vllm_mode vllm_server_base_url vllm_server_host vllm_server_port vllm_group_port"
    ),
    "vllm.engine_args = { model_impl = ... }": "vllm_model_impl",
    "vllm.standby, which is on": "vllm_enable_sleep_mode",
    "sampling.extra = { structured_outputs = ... }": "vllm_structured_outputs_regex",
    "vllm.gpu_memory in bytes or as '75GiB'; what is free by default": (
        "vllm_gpu_memory_utilization"
    ),
    "sampling.extra = { repetition_penalty = ... } with engine = 'vllm'": "repetition_penalty",
    "the embedded engine has one KV cache; engine = 'vllm' pages its": "cache_implementation",
    "engine = 'vllm' batches continuously": (
        "use_transformers_continuous_batching transformers_continuous_batching_config"
    ),
    "engine = 'vllm' pages its KV cache": "use_transformers_paged",
    "an evaluation draws one completion a question, greedy by default": "num_generations_eval",
    "there is no VESPO loss; loss.name is one of fxrl.losses, or module:function": (
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"
    ),
    "rewards are summed by reward.weights, then scaled as scale_rewards says": (
        "multi_objective_aggregation"
    ),
    "the reference policy stays the one that training began with": (
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"
    ),
    "the entropy bonus is constant: loss.entropy_coef": (
        "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"
    ),
    "there are no labels; loss.name = 'module:function' is your own": "label_smoothing_factor",
    "further keys of [optim] go to the optimizer of torch.optim": "optim_args",
    "optim.betas = [0.9, 0.999]": "adam_beta1 adam_beta2",
    "model.lora.targets names what is trained": "optim_target_modules",
    "optim.schedule and optim.warmup_steps are all": "lr_scheduler_kwargs",
    "optim.warmup_steps, in updates": "warmup_ratio",
    "prompts are text": "log_multimodal",
    "log_completions samples are spread over the step's prompts": "log_unique_prompts",
    "completions.jsonl in run_dir has them": "log_completions_hub_repo",
    "it is by steps: save_every, eval.every; each step is logged; 0 is never": (
        "logging_strategy eval_strategy save_strategy"
    ),
    "each step is logged: metrics.jsonl, and where log_to says": "logging_steps logging_first_step",
    "run_dir/tensorboard": "logging_dir",
    "a number that is not finite is null in metrics.jsonl; max_nonfinite stops the run": (
        "logging_nan_inf_filter"
    ),
    "num_tokens is in every line of metrics.jsonl": "include_num_input_tokens_seen",
    "--json gives lines for tools; a terminal gets a live view": (
        "log_level log_level_replica disable_tqdm"
    ),
    "the run has the name of run_dir's last part": "run_name",
    "log_to = ['trackio'] with project; trackio's own environment variables say where": (
        "trackio_space_id trackio_bucket_id trackio_static_space_id"
    ),
    "[eval] size holds questions out or dataset gives them, every says when, greedy how; see "
    "examples/config.md": (
        "eval_delay prediction_loss_only eval_do_concat_batches eval_use_gather_object "
        "eval_accumulation_steps include_for_metrics batch_eval_metrics"
    ),
    "with held-out questions an evaluation goes before the first step": "eval_on_start",
    "a checkpoint has all that a run goes on from; final/ is the model": "save_only_model",
    "SIGTERM saves a checkpoint after the step that runs": "enable_jit_checkpoint",
    "the newest keep_checkpoints are kept; metrics.jsonl tells which step was best": (
        "load_best_model_at_end metric_for_best_model greater_is_better"
    ),
    "fxrl train CONFIG.toml --resume [DIR]": "resume_from_checkpoint",
    "a resumed run goes on at its place in the data": "ignore_data_skip",
    "a callback keeps its own state": "restore_callback_states_from_checkpoint",
    "a seed makes a run repeatable on one machine": "full_determinism",
    "the repository keeps its own settings: create it first (hf repo create); hf auth login": (
        "hub_token hub_private_repo hub_revision"
    ),
    "hub_strategy = 'every_save' waits for each push": "hub_always_push",
    "all columns reach the rewards; the model gets the prompt's tokens alone": (
        "remove_unused_columns label_names"
    ),
    "rows are in memory and there is no DataLoader; data.shuffle orders them": (
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order train_sampling_strategy "
        "length_column_name"
    ),
    "fxrl verify and fxrl dump show what was rewritten": "debug",
    "memory/peak_bytes is in metrics.jsonl on a GPU": "skip_memory_metrics",
    "fxrl train CONFIG.toml trains, and evaluates as [eval] says": "do_train do_eval do_predict",
}
"""What is said of TRL's names behind it: what does that here, or why there is none."""

INSTEAD: Mapping[str, str] = MappingProxyType(
    {name: answer for answer, names in _ANSWERS.items() for name in names.split()}
)
"""TRL's name -> what does that here, or why there is none."""
