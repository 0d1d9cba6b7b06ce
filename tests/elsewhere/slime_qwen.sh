# Options of slime's run-qwen2.5-0.5B-gsm8k.sh.
MODEL="/models/Qwen2.5-0.5B-Instruct"
CKPT_ARGS=(
  --hf-checkpoint "${MODEL}"
  --ref-load "${MODEL}_torch_dist"
)
ROLLOUT_ARGS=(
  --prompt-data /data/gsm8k/train.parquet --input-key messages --label-key label --apply-chat-template
  --rollout-shuffle --rm-type math --num-rollout 40 --rollout-batch-size 32 --n-samples-per-prompt 8
  --rollout-max-response-len 2048 --rollout-temperature 0.8 --global-batch-size 256
)
EVAL_ARGS=(
  --eval-interval 50 --eval-prompt-data gsm8k /data/gsm8k/test.parquet --n-samples-per-eval-prompt 1
  --eval-max-response-len 512 --eval-top-k 1
)
PERF_ARGS=(
  --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel
  --use-dynamic-batch-size --max-tokens-per-gpu 8092
)
GRPO_ARGS=(
  --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --kl-coef 0.00
  --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28
)
OPTIMIZER_ARGS=(
  --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
)
SGLANG_ARGS=(
  --rollout-num-gpus 2 --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7
  --sglang-enable-deterministic-inference --sglang-attention-backend flashinfer
)
MISC_ARGS=(
  --calculate-per-token-loss --use-slime-router --deterministic-mode --attention-dropout 0.0 --hidden-dropout 0.0
  --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --attention-backend flash
)
python3 train.py --train-backend megatron --actor-num-nodes 1 --actor-num-gpus-per-node 2 --colocate ${CKPT_ARGS[@]}
