# VILA: the language model in FP8 with FP8 activations, the tower frozen. In the folder that holds examples:
#   octavo tiny nvila build/tiny/nvila
#   octavo digits build/digits
#   octavo import examples/import/vila.sh -o build/import/vila.yaml
#   octavo train build/import/vila.yaml
MODEL=${1:-build/tiny/nvila}
torchrun --nnodes=1 --nproc_per_node=1 \
    llava/train/train_mem.py \
        --model_name_or_path $MODEL \
        --data_path build/digits/train.json \
        --tune_vision_tower False \
        --tune_mm_projector True \
        --tune_language_model True \
        --bf16 True \
        --max_steps 2 \
        --per_device_train_batch_size 2 \
        --gradient_accumulation_steps 1 \
        --learning_rate 1e-3 \
        --weight_decay 0. \
        --warmup_ratio 0.5 \
        --lr_scheduler_type cosine \
        --logging_steps 1 \
        --save_steps 100 \
        --model_max_length 512 \
        --gradient_checkpointing True \
        --output_dir runs/import/vila \
        --report_to none \
        --quantize_model fp8Activation_qwen2 \
        --fabit E4M3 \
        --fwbit E4M3 \
        --bobit E5M2 \
        --row_blocksize -1 \
        --col_blocksize -1 \
        --group_size 16 \
        --pad_to_multiple_of 128
