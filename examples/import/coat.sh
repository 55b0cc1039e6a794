# COAT: FP8 activations and FP8 optimizer states with range expansion, on a tiny Llama. In the folder that holds examples:
#   octavo tiny llama build/tiny/llama
#   octavo digits build/digits
#   octavo import examples/import/coat.sh -o build/import/coat.yaml
#   octavo train build/import/coat.yaml
export MODEL=build/tiny/llama
torchrun --nproc_per_node=1 toolbench/train/train_fp8.py \
    --model_name_or_path $MODEL \
    --fp8_model_name_or_path build/converted \
    --data_path build/digits/train_text.json \
    --bf16 True \
    --max_steps 2 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 1 \
    --learning_rate 1e-3 \
    --weight_decay 0. \
    --warmup_steps 1 \
    --lr_scheduler_type cosine \
    --logging_steps 1 \
    --model_max_length 512 \
    --output_dir runs/import/coat \
    --report_to none \
    --quantize_model true \
    --fabit E4M3 \
    --fwbit E4M3 \
    --bobit E5M2 \
    --group_size 16 \
    --first_order_expansion true \
    --second_order_expansion true \
    --qgroup_size 128
