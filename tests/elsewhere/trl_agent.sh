# Options of TRL's example grpo_agent.py.
python examples/scripts/grpo_agent.py --model_name_or_path Qwen/Qwen3-1.7B --output_dir grpo_biogrid_qwen_3g-1.7b \
  --push_to_hub True --use_vllm True --vllm_mode colocate --max_completion_length 1024 --report_to trackio \
  --log_completions True --max_steps 400
