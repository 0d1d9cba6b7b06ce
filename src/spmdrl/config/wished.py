"""Names from other trainers that have no key here, each with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping

_ANSWERS: tuple[tuple[str, str], ...] = (
    (
        "peft use_peft use_lora lora_cfg",
        "set lora={} for adapters of default sizes, or lora.rank, lora.alpha and lora.targets",
    ),
    ("lora_dropout", "adapters have no dropout: rollout and trainer must compute alike"),
    ("qlora", "weights aren't quantized; lora={} trains adapters beside weights in model.dtype"),
    (
        "load_in_4bit load_in_8bit quantization",
        "weights aren't quantized; model.dtype is float32 or bfloat16",
    ),
    ("dry_run", "`spmdrl check` with the same files and keys checks them and trains nothing"),
    (
        "tools multi_turn agent_loop tool_config_path environment_factory max_tool_calling_iterations",
        "set environment.function to calculator or file.py:Name, a class whose step(episode) answers the model's turns",
    ),
    ("config config_file config_name", "write the file without a flag, as in `spmdrl train run.yaml`"),
    ("prompt prompts", "prompts are answered by generate: `spmdrl generate model.path=runs/a prompt='12+30='`"),
    ("verbose log_level", "every step is printed, and all metrics are in metrics.jsonl of the run's folder"),
    ("logging_steps log_freq", "every step is logged"),
    (
        "save_best load_best_model_at_end metric_for_best_model best_by",
        "set checkpoint.best to a metric such as eval/accuracy, and checkpoint.keep_best to how many are kept",
    ),
    ("max_ckpt_num", "set checkpoint.keep_last"),
    ("save_strategy", "set checkpoint.interval; 0 saves only the last step"),
    ("save_only_model save_hf_ckpt", "set checkpoint.model_only; each checkpoint holds model/, a Hugging Face folder"),
    ("push_to_hub hub_model_id", "a checkpoint's model/ is a Hugging Face folder; upload it with `hf upload`"),
    ("resume_from_checkpoint resume_from_path load_checkpoint", "set resume to auto, a step or a checkpoint folder"),
    ("eval_freq eval_strategy evaluation_strategy", "set eval.interval; 0 is only before and after"),
    (
        "gradient_accumulation_steps",
        "rows are cut into micro-batches of train.max_tokens_per_microbatch tokens, and their gradients summed",
    ),
    (
        "per_device_train_batch_size micro_batch_size micro_train_batch_size train_micro_batch_size "
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu per_device_batch_size batch_size",
        "a step takes rollout.prompts_per_step prompts (rows_per_step in sft, preferences and reward_model), and its "
        "micro-batches train.max_tokens_per_microbatch tokens",
    ),
    ("per_device_eval_batch_size val_batch_size", "evaluations take all rows of data.eval, or eval.max_rows of them"),
    (
        "steps_per_generation",
        "set train.updates_per_step, the optimizer steps that a step's samples are split into",
    ),
    (
        "num_train_epochs total_epochs num_epochs epochs num_episodes",
        "set train.max_steps to epochs x rows / rollout.prompts_per_step; `spmdrl check` prints the epochs",
    ),
    ("max_train_steps num_steps", "set train.max_steps"),
    ("warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio", "set optim.warmup_steps, a number of optimizer steps"),
    ("lr_scheduler_type lr_scheduler lr_decay_style", "set optim.schedule to constant, linear or cosine"),
    ("adam_beta1 adam_beta2 adam_betas", "set optim.betas to both, as in [0.9, 0.999]"),
    (
        "deepspeed zero_stage zero3 fsdp fsdp_config accelerate strategy",
        "FSDP2 is built in: resources.update sets over how many ranks weights, gradients and optimizer are cut",
    ),
    (
        "use_vllm vllm_mode vllm colocate_all_models",
        "set rollout.engine to vllm; auto takes it wherever it is installed and there is an accelerator",
    ),
    ("sglang use_sglang", "rollout.engine is native or vllm"),
    (
        "tensor_parallel_size tensor_model_parallel_size vllm_tensor_parallel_size tp tp_size",
        "set resources.generation.tensor for generating, and resources.update.tensor for training",
    ),
    ("pipeline_model_parallel_size pipeline_parallel_size pp_size", "set resources.update.pipeline"),
    (
        "context_parallel_size ulysses_sequence_parallel_size sequence_parallel_size ring_attn_size",
        "set resources.update.context",
    ),
    ("expert_model_parallel_size expert_parallel_size", "set resources.update.expert and resources.generation.expert"),
    (
        "n_gpus_per_node nnodes num_gpus gpus nproc_per_node num_processes ranks",
        "torchrun starts the ranks: torchrun --nproc-per-node 8 --nnodes 2 ... -m spmdrl train run.yaml",
    ),
    ("ray ray_init num_workers", "there is no Ray; torchrun starts all ranks, and reward.workers judge beside them"),
    ("report_to logger use_wandb use_tensorboard", "set log.backends, as in [console, jsonl, wandb]"),
    ("wandb_project project_name", "set log.project"),
    ("exp_name wandb_run_name", "set run.name"),
    ("fp16 tf32 torch_dtype", "set model.dtype to float32 or bfloat16"),
    (
        "enable_gradient_checkpointing recompute_granularity",
        "set train.activation_checkpointing to full",
    ),
    (
        "attn_implementation use_flash_attn flash_attn flash_attention_2 use_liger_kernel",
        "kernels are chosen by the device and by what is installed; there is nothing to set",
    ),
    ("device_map", "set resources.device for the kind of device, and resources.update for what each rank holds"),
    ("trust_remote_code", "a model's code comes from this package only; remote code is never run"),
    ("packing packing_samples use_dynamic_bsz use_dynamic_batch", "rows are always packed, by their tokens"),
    ("max_tokens", "set rollout.max_completion_length"),
    (
        "max_len max_length max_seq_length max_model_len",
        "lengths are data.max_prompt_length and rollout.max_completion_length",
    ),
    (
        "use_kl_loss use_kl_in_reward",
        "algo.kl_coef > 0 turns the KL term on, and algo.kl_in is loss, reward or advantage",
    ),
    ("target_kl kl_ctrl", "set algo.kl_target, nats per response, and algo.kl_gain; algo.name=ppo has them"),
    (
        "ref_model sync_ref_model ref",
        "the reference is the model that the run starts from, used where algo.kl_coef > 0",
    ),
    ("clip_ratio cliprange clip_range eps_clip_low_high", "set algo.clip_ratio_low and algo.clip_ratio_high"),
    ("dual_clip", "set algo.clip_ratio_c"),
    ("adv_estimator advantage_estimator estimator", "algo.name is the algorithm"),
    (
        "loss_agg_mode",
        "set algo.loss_agg: token-mean (TRL's dapo), seq-mean-token-mean (grpo), seq-mean-token-sum or "
        "seq-mean-token-sum-norm (dr_grpo)",
    ),
    (
        "filter_groups dynamic_sampling dynamic_sampling_filter_path use_dynamic_sampling",
        "algo.name=dapo leaves out prompts whose responses are all right or all wrong; algo.filter_on names a function",
    ),
    (
        "overlong_buffer overlong_buffer_cfg overlong_buffer_len soft_overlong_punishment",
        "set algo.overlong_cache, in tokens; algo.name=dapo has it",
    ),
    (
        "vllm_importance_sampling_correction vllm_importance_sampling_cap enable_vllm_is_correction rollout_correction",
        "set algo.rollout_is, as in tis, and algo.rollout_is_clip",
    ),
    (
        "reward_model.path reward_model.model.path reward_model.enable reward_model_path reward_pretrain remote_rm_url "
        "reward_model_name_or_path",
        "set reward.model.path to a folder or hub name; a function of reward.functions may also query a server",
    ),
    ("custom_reward_function compute_score reward_fn reward_func", "set reward.functions, as in [file.py:fn]"),
    ("value_model value_model_path critic_model_path", "set critic.path to a model folder, or critic={} for the model"),
    ("use_pf_ppo pf_ppo", "set algo.name to pf_ppo; algo.filter, algo.filter_power and algo.filter_scope are its keys"),
    (
        "teacher_model teacher_model_path teacher_path teacher_model_name_or_path",
        "set teacher.path to a model folder, and algo.name to opd",
    ),
    ("critic_warmup critic_warmup_steps", "set critic.warmup_steps, steps in which only the critic is trained"),
    (
        "algo.name=on_policy_distillation algo.name=distillation",
        "opd distils by sampled tokens, gkd by distributions; teacher.path is the teacher",
    ),
    ("algo.name=gae", "it is named ppo; critic.gamma and critic.lam are the estimate's"),
    ("algo.name=reinforce_plus_plus algo.name=reinforce++", "it is named reinforce_pp"),
    ("algo.name=reinforce_plus_plus_baseline", "it is named reinforce_pp_baseline"),
    (
        "algo.name=dpo algo.name=ipo",
        "DPO on pairs in a file is a verb, `spmdrl preferences`; on responses of the step it is named online_dpo",
    ),
    ("algo.name=kto", "there is no KTO; `spmdrl preferences` learns from pairs of responses, by DPO and its kind"),
    ("rollout.name", "set rollout.engine to native or vllm"),
    ("critic.model.path critic.model critic.model_name_or_path", "set critic.path to a model folder"),
    ("data.truncation truncation", "prompts aren't cut; data.on_bad_row=skip leaves out those that are too long"),
    ("ckpt.path ckpt_path default_local_dir", "checkpoints go into the run's folder; set run.dir"),
    (
        "optim=adamw_torch optim=adamw_torch_fused optim=adamw optim=adam",
        "the optimizer is AdamW; set optim.lr and others",
    ),
    ("algo.name=sft", "supervised training is a verb, `spmdrl sft`; sft.max_steps > 0 runs it before train"),
)

WISHED: Mapping[str, str] = {name: answer for names, answer in _ANSWERS for name in names.split()}
