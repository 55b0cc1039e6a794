#! /bin/bash
export TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1
MEGATRON_PATH=${MEGATRON_PATH:-"/somewhere/megatron"}
export LOONGFORGE_PATH=${LOONGFORGE_PATH:-"/somewhere/loongforge"}
DATA_PATH=${DATA_PATH:-"/somewhere/wds/"}
TOKENIZER_PATH=${TOKENIZER_PATH:-"/somewhere/Some-VL"}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-"/somewhere/checkpoint"}
TENSORBOARD_PATH=${TENSORBOARD_PATH:-"/somewhere/tb"}
export FP8_QUANT_FWD_INP_AMAX_EPS=1e-12
GPUS_PER_NODE=8
NNODES=${WORLD_SIZE:-"2"}
NODE_RANK=${RANK:-"0"}
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --node_rank $NODE_RANK
    --master_addr $MASTER_ADDR
)
MODEL_CONFIG_PATH=${LOONGFORGE_PATH}/configs/some.yaml
DATA_ARGS=(
    --tokenizer-type HFTokenizer
    --hf-tokenizer-path $TOKENIZER_PATH
    --data-path $DATA_PATH
    --dataloader-type external
    --split 100,0,0
    --enable-discard-sample
    --num-workers 4
    # --packing-buffer-size 500
)
TRAINING_ARGS=(
    --training-phase sft # options: pretrain, sft
    --seq-length 4096
    --max-position-embeddings 4096
    --init-method-std 0.01
    --micro-batch-size 2
    --global-batch-size 64
    --lr 0.0003
    --min-lr 2.0e-5
    --clip-grad 0.7
    --weight-decay 0.05
    --optimizer adam
    --adam-beta1 0.9
    --adam-beta2 0.97
    --adam-eps 1e-06
    --norm-epsilon 1e-6
    --train-iters 4000
    --lr-decay-iters 4000
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --initial-loss-scale 65536
    --bf16
    #--load $CHECKPOINT_PATH
    --no-load-optim
    --save-interval 800
    --ckpt-format torch
    --dataloader-save ${CHECKPOINT_PATH}/dataloader
    --fp8-recipe delayed
)
MOE_ARGS=(
    --moe-router-load-balancing-type aux_loss
    --moe-router-topk 4
    --moe-aux-loss-coeff 2e-3
    --moe-grouped-gemm
    --moe-router-dtype fp32
    --empty-unused-memory-level 2
)
MODEL_PARALLEL_ARGS=(
    --attention-backend flash
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 2
    --expert-model-parallel-size 4
    --moe-token-dispatcher-type alltoall
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --distributed-backend nccl
)
MODEL_CONFIG_ARGS=(
    --config-file $MODEL_CONFIG_PATH
)
LOGGING_ARGS=(
    --log-interval 10
    --tensorboard-dir ${TENSORBOARD_PATH}
    --log-timers-to-tensorboard
)
if [ -n "${WANDB_API_KEY}" ]; then
    LOGGING_ARGS+=(
        --wandb-project ${WANDB_PROJECT}
    )
fi
PYTHONPATH=$MEGATRON_PATH:$LOONGFORGE_PATH:$PYTHONPATH \
    torchrun ${DISTRIBUTED_ARGS[@]} \
    $LOONGFORGE_PATH/loongforge/train.py \
    ${MODEL_CONFIG_ARGS[@]} \
    ${DATA_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${MOE_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${LOGGING_ARGS[@]} \
    +model.image_encoder.freeze=True \
