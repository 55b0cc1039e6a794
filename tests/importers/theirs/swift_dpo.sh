# about 24 GiB
CUDA_VISIBLE_DEVICES=6 \
swift rlhf \
    --rlhf_type dpo \
    --model some/Qwen2.5-7B-Instruct \
    --train_type lora \
    --dataset some/pairs#500 \
    --load_from_cache_file true \
    --split_dataset_ratio 0.02 \
    --torch_dtype bfloat16 \
    --num_train_epochs 2 \
    --per_device_train_batch_size 2 \
    --per_device_eval_batch_size 1 \
    --learning_rate 2e-4 \
    --lora_rank 16 \
    --lora_alpha 48 \
    --target_modules all-linear \
    --gradient_accumulation_steps 8 \
    --eval_steps 25 \
    --save_steps 30 \
    --save_total_limit 3 \
    --logging_steps 4 \
    --max_length 1024 \
    --output_dir some_output \
    --warmup_ratio 0.05 \
    --dataloader_num_workers 2 \
    --rpo_alpha 0.2 \
    --dataset_num_proc 2
