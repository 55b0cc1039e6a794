# ms-swift: preferences are in its examples too; this one is LoRA of a tiny Qwen3. In the folder that holds examples:
#   octavo tiny qwen3 build/tiny/qwen3
#   octavo digits build/digits
#   octavo import examples/import/ms_swift.sh -o build/import/ms_swift.yaml
#   octavo train build/import/ms_swift.yaml
ROWS=${ROWS:-build/digits/train_text.json}
CUDA_VISIBLE_DEVICES=0 \
swift sft \
    --model build/tiny/qwen3 \
    --train_type lora \
    --lora_rank 4 \
    --target_modules all-linear \
    --dataset "$ROWS#64" \
    --torch_dtype bfloat16 \
    --max_length 512 \
    --truncation_strategy delete \
    --max_steps 2 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 2 \
    --learning_rate 1e-3 \
    --warmup_ratio 0.5 \
    --logging_steps 1 \
    --save_steps 100 \
    --output_dir runs/import/ms_swift \
    --report_to tensorboard
