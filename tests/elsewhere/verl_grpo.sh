# Settings of verl's run_qwen3_8b_fsdp.sh for GRPO, on GPUs.
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
max_tokens=24576
python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
  data.train_files="['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']" \
  data.val_files="['$HOME/data/gsm8k/test.parquet', '$HOME/data/math/test.parquet']" \
  data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=2048 \
  data.filter_overlong_prompts=True data.truncation='error' \
  actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${max_tokens} actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.fsdp_config.param_offload=False \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=False actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=${max_tokens} \
  actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=${max_tokens} \
  actor_rollout_ref.ref.fsdp_config.param_offload=True \
  trainer.balance_batch=True trainer.logger='["console","wandb"]' trainer.project_name=verl_grpo_gsm8k_math \
  trainer.experiment_name=qwen3_8b_grpo_vllm_fsdp trainer.n_gpus_per_node=${NGPUS_PER_NODE} trainer.nnodes=1 \
  trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
