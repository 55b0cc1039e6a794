TRAINING_ARGS=(
    --training-phase sft
    --seq-length 128
    --micro-batch-size 4
    --global-batch-size 8
    --lr 0.001
    --min-lr 0.0001
    --train-iters 2
    --lr-decay-iters 2
    --lr-decay-style cosine
    --lr-warmup-iters 1
    --clip-grad 1.0
    --bf16
    --no-load-optim
    --no-load-rng
    --save runs/import/loongforge
    --save-interval 100
)
DATA_ARGS=(
    --hf-tokenizer-path build/tiny/qwen3_vl
    --data-path build/digits/train.json
    --enable-discard-sample
)
torchrun --nproc_per_node 1 loongforge/train.py \
    --config-file configs/models/tiny.yaml \
    ${DATA_ARGS[@]} \
    ${TRAINING_ARGS[@]}
