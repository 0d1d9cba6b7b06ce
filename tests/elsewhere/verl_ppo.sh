# Settings of verl's run_qwen2-7b_seq_balance.sh for PPO.
files=/data/gsm8k/train.parquet
python3 -m verl.trainer.main_ppo data.train_files="['$files', '/data/math/train.parquet']" \
  data.val_files="['/data/gsm8k/test.parquet', '/data/math/test.parquet']" data.train_batch_size=4096 \
  data.val_batch_size=1312 data.max_prompt_length=4096 data.max_response_length=4096 \
  actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.ppo_mini_batch_size=512 actor_rollout_ref.actor.ppo_micro_batch_size=128 \
  actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
  actor_rollout_ref.rollout.log_prob_micro_batch_size=256 actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  actor_rollout_ref.ref.log_prob_micro_batch_size=256 actor_rollout_ref.ref.fsdp_config.param_offload=True \
  critic.optim.lr=1e-5 critic.model.use_remove_padding=True critic.model.path=Qwen/Qwen2.5-Math-PRM-7B \
  critic.model.enable_gradient_checkpointing=True critic.ppo_micro_batch_size=256 \
  critic.model.fsdp_config.param_offload=False critic.model.fsdp_config.optimizer_offload=False \
  algorithm.kl_ctrl.kl_coef=0.001 trainer.critic_warmup=0 trainer.logger="['console','wandb']" \
  trainer.project_name=verl_example_gsm8k trainer.experiment_name=qwen2-7b_function_rm trainer.n_gpus_per_node=8 \
  +trainer.val_before_train=False trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=15
