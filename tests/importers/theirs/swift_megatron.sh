PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
NPROC_PER_NODE=8 \
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
megatron sft \
    --load Some-14B-mcore \
    --dataset 'some/rows' \
    --split_dataset_ratio 0.01 \
    --tensor_model_parallel_size 4 \
    --micro_batch_size 1 \
    --global_batch_size 32 \
    --packing true \
    --recompute_granularity selective \
    --train_iters 1000 \
    --eval_iters 20 \
    --finetune true \
    --cross_entropy_loss_fusion true \
    --lr 2e-5 \
    --lr_warmup_fraction 0.02 \
    --min_lr 2e-6 \
    --save some_output/run \
    --eval_interval 100 \
    --save_interval 100 \
    --max_length 4096 \
    --num_workers 4 \
    --dataset_num_proc 4 \
    --no_save_optim true \
    --no_save_rng true \
    --fp8_format hybrid \
    --fp8_param_gather true \
    --sequence_parallel true \
    --attention_backend flash
