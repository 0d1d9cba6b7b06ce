# Options of TRL's example gspo.py.
accelerate launch examples/scripts/gspo.py --model_name_or_path Qwen/Qwen3-0.6B --output_dir gspo-Qwen3-0.6B \
  --learning_rate 1e-5 --dtype bfloat16 --max_completion_length 1024 --use_peft --lora_target_modules "q_proj", "v_proj" \
  --log_completions --per_device_train_batch_size 8 --num_generations 8 --importance_sampling_level sequence \
  --epsilon 3e-4 --epsilon_high 4e-4 --beta 0.0 --loss_type grpo --gradient_accumulation_steps 2 --steps_per_generation 8
