# Settings of verl's run_qwen2_5_0_5b_fsdp.sh for supervised training, with adapters.
torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer \
  data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet \
  data.messages_key=messages data.micro_batch_size_per_gpu=4 optim.lr=1e-4 engine=fsdp \
  engine.ulysses_sequence_parallel_size=1 model.path=Qwen/Qwen2.5-0.5B-Instruct model.use_remove_padding=true \
  trainer.default_local_dir=/tmp/sft-ckpt trainer.project_name=gsm8k-sft trainer.experiment_name=gsm8k-sft-qwen2_5_0_5b \
  trainer.logger='["console","wandb"]' trainer.total_epochs=1 model.lora_rank=32 model.lora_alpha=16 \
  model.target_modules=all-linear
