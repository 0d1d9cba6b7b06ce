# Options of TRL's dpo.py, with adapters.
python trl/scripts/dpo.py --dataset_name trl-lib/ultrafeedback_binarized --dataset_streaming \
  --model_name_or_path Qwen/Qwen2-0.5B-Instruct --learning_rate 5.0e-6 --num_train_epochs 1 \
  --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --gradient_checkpointing --logging_steps 25 \
  --eval_strategy steps --eval_steps 50 --output_dir Qwen2-0.5B-DPO --no_remove_unused_columns --use_peft --lora_r 32 \
  --lora_alpha 16
