#!/bin/bash
DEFAULT_RUN_NAME="some-run"
DEFAULT_GLOBAL_TRAIN_BATCH_SIZE=64

source scripts/setups/train.sh

STAGE2_PATH=${1:-"some/vila-qwen2-7b"}
DATA_MIXTURE=${DATA_MIXTURE:-"some_rows+more_rows"}
echo "DATA_MIXTURE = $DATA_MIXTURE"

if [ "$NNODES" = "1" ]; then
    echo "one machine"
    PER_DEVICE_TRAIN_BATCH_SIZE=2
fi
PER_DEVICE_TRAIN_BATCH_SIZE=${COAT_BS:-"6"}

torchrun \
    --nnodes=$NNODES --nproc_per_node=$GPUS_PER_NODE --node_rank=$NODE_RANK \
    --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT \
    llava/train/train_mem.py \
        --deepspeed scripts/zero3.json \
        --model_name_or_path $STAGE2_PATH \
        --data_mixture $DATA_MIXTURE \
        --vision_tower some/siglip \
        --mm_vision_select_feature cls_patch \
        --mm_projector mlp_downsample \
        --tune_vision_tower False \
        --tune_mm_projector True \
        --tune_language_model True \
        --mm_vision_select_layer -2 \
        --mm_use_im_start_end False \
        --mm_use_im_patch_token False \
        --image_aspect_ratio resize \
        --bf16 True \
        --output_dir $OUTPUT_DIR/model \
        --num_train_epochs 1 \
        --per_device_train_batch_size $PER_DEVICE_TRAIN_BATCH_SIZE \
        --gradient_accumulation_steps $GRADIENT_ACCUMULATION_STEPS \
        --evaluation_strategy no \
        --save_strategy steps \
        --max_steps 200 \
        --save_steps 50 \
        --save_total_limit 3 \
        --learning_rate 2e-5 \
        --weight_decay 0.1 \
        --warmup_ratio 0.05 \
        --lr_scheduler_type cosine \
        --logging_steps 2 \
        --model_max_length 2048 \
        --gradient_checkpointing True \
        --dataloader_num_workers 4 \
        --vflan_no_system_prompt True \
        --report_to wandb \
        --quantize_model "fp8Linear_qwen2" \
        --fabit "E4M3" \
        --fwbit "E4M3" \
        --bobit "E5M2" \
        --row_blocksize -1 \
        --col_blocksize -1 \
        --pad_to_multiple_of 128 \
        --use_quantize_optimizer True \
        --row_blocksize_optimizer 1 \
        --seq_parallel_size 4 \
        --seq_parallel_ring_size 2 \
        --seq_parallel_ring_type zigzag_ring_varlen
