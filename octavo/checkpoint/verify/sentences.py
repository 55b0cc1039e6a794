"""The sentence of every kind of finding; the keys of a kind with several sentences are `kind/case`.

A sentence about a `tensor` (with its `shape`) is preceded by "'NAME' in FILE"; a sentence about a file has `file` and,
if it concerns one tensor, `name`. The check that reports the finding passes all other values.
"""

SENTENCES: dict[str, str] = {
    # Files
    "no-weights": "{folder} contains neither {single.name} nor {index.name}: there are no weights to load.",
    "only-pickles": "{file} is a pickle, which can run code when it is read, and the folder has no safetensors; save "
    "the model with save_pretrained (safetensors is its format).",
    "pickle-beside": "{file} is a pickle in a folder with safetensors ({count} such files): no loader needs it; "
    "delete it.",
    "index-stale": "{file} names {count} files that do not exist (first {first}), and {single.name} does: transformers "
    "reads the single file, and vLLM refuses the folder; delete {file}.",
    "two-layouts": "{folder.name} contains both {single.name} and {file}: transformers reads the single file, vLLM "
    "the files in the index; delete the older of the two.",
    "extra-shard/beside": "{file} is in the folder with {single.name} and without an index: transformers leaves it "
    "out, vLLM and SGLang read both; delete the older of the two.",
    "extra-shard/consolidated": "{file} makes vLLM read only consolidated*.safetensors, which transformers leaves out; "
    "delete {file} if the other files hold the model.",
    "extra-shard/hidden": "{file} is a hidden file, as macOS writes: no loader reads its tensors, but vLLM reads its "
    "header if config.json ties the head; delete it.",
    "extra-shard/unnamed": "{file} is not named by {index.name}: loaders leave its tensors out; delete it, or "
    "write the index again.",
    "missing-shard": "{file} is missing, although {index.name} places {name!r} and {others} more tensors in it; "
    "download the shard again.",
    "index-tensor": "{file} does not contain {name!r}, although {index.name} places it there; download both again.",
    "index-entry/elsewhere": "{file} places {name!r} in {shard}, but {file_with_it} contains it; write the index "
    "again.",
    "index-entry/none": "has no entry in {index.name}: a program that reads by the index misses it; write the index "
    "again.",
    "duplicate": "is in {first.file} too: the loader decides which one is loaded; keep the right one and write the "
    "index again.",
    "duplicate/stacked": "{file} holds the experts stacked as {name!r}, and {other.file} one by one ({single!r}); "
    "keep one of them.",
    "adapter-config": "{file} is in the folder of a model, and transformers would load the model that it names; move "
    "it to a separate folder.",
    "name": "File name {file!r} contains control characters, which a terminal interprets; rename the file.",
    "special": "{file} is {what}, not a file: copying or loading the folder may hang; remove it.",
    "link/broken": "{file} is a link to {target}, which cannot be read ({why}); replace the link by the file.",
    "link/outside": "{file} is a link out of the folder, to {target}: a copy of the folder does not contain it; "
    "replace the link by the file.",
    "encrypted": "{file} is encrypted ({count} such files), and no loader opens it; run octavo decrypt {folder} "
    "before loading it.",
    "sum/missing": "{file} is missing, although the export wrote it; export the folder again.",
    "sum/shard": "{file} is not what the export wrote: its SHA-256 differs; export or copy it again.",
    "sum/other": "{file} was changed after the export wrote it.",
    "export-note/changed": "{file} was changed after the export wrote it, so its checksums of the other files prove "
    "nothing; export the folder again.",
    "template": "{file}: {problem}",
    "token-ids": "{file} has tokens up to number {largest}, but the model has {rows} rows of embeddings: tokens "
    "beyond them cannot be embedded; use the tokenizer that belongs to the model.",
    "letters": "{file} has no token for {count} letters and digits of ASCII (first {first}): they are dropped from "
    "texts; use the tokenizer that belongs to the model.",
    "end-token": "{file} stops at {stated}, but the chat template ends answers with {end}: a model that learned the "
    "template generates up to the limit; write eos_token_id {ends}.",
    "end-token-of-tokenizer": "{file} stops at {stated}, but the chat template ends answers with {end}, the "
    "tokenizer's end token: transformers generates up to the limit, servers stop; write eos_token_id {ends}.",
    "config/empty": "{file} is an empty object: it describes no model; use the one that belongs to the weights.",
    # Names, shapes and config.json
    "own-family": "{file} has model_type {family!r}, for which transformers has no class: its Auto classes load the "
    "folder after octavo is imported, and a server needs its own code for it.",
    "composed": "{file} has model_type {family!r}, of octavo compose: transformers' Auto classes load the folder after "
    "octavo is imported, and no server has a class for it.",
    "mpt-fields": "{file} describes an MPT trained with LLM-Foundry: {fields} are used by LLM-Foundry and Octavo, and "
    "silently ignored by transformers' class of that name.",
    "missing": "{name!r} {wanted} is in no file of {folder.name}: transformers would fill it with random numbers and "
    "only warn; write the checkpoint again, or use the config.json that belongs to it.",
    "extra": "has shape {shape}, but the model of config.json does not have it; use the config.json that belongs to "
    "these weights, or write them without it.",
    "shape": "has shape {shape} where the model of config.json has {wanted}{hint}; write it again, or use the "
    "config.json that belongs to these weights.",
    "dtype": "is {tensor.dtype}; weights are BF16, F16, F32 or FP8 codes (F8_E4M3): write it again in one of them.",
    "e5m2": "is F8_E5M2, but loaders take weights only in F8_E4M3; quantize it again.",
    "tied": "differs from {first.name!r}, although config.json ties them (tie_word_embeddings): loaders keep one of "
    "the two; set tie_word_embeddings to false, or write the folder without it.",
    "tied-twice": "repeats {first.name!r}, which config.json ties it to: it wastes {tensor.size} bytes; write the "
    "folder without it.",
    "quantization-lost/none": "config.json has no quantization_config, but {count} tensors are FP8 codes, e.g. "
    "{name!r} in {file}, and there are no scales: loaders take codes for values. Put the quantization_config "
    "back (the export that wrote the codes has it), or export the model again.",
    "quantization-lost/scales": "config.json has no quantization_config, but {count} tensors are FP8 codes, e.g. "
    "{name!r} in {file}, with scales: transformers takes codes for values, and vLLM has no parameters for the "
    "scales. Put the quantization_config back (the export that wrote the codes has it), or export the model again.",
    "quantization-file": "{file} is in the folder, and config.json has no quantization_config: vLLM and SGLang take "
    "ModelOpt's quantization ({algorithm}) from it, and no tensor is quantized; delete {file}.",
    "modelopt": "{file} describes ModelOpt's quantization ({algorithm}), which vLLM and SGLang read and "
    "Octavo does not; export the model in one of Octavo's formats.",
    "quantization-word": "config.json has quant_method {method!r}: vLLM and SGLang read it, and transformers skips it "
    "and takes codes for values; write {right!r}.",
    "quantization-without-codes": "config.json has a quantization_config, but no tensor is FP8: vLLM and SGLang would "
    "expect scales; remove the block from config.json, or write the quantized weights.",
    "no-architectures": "config.json names no architectures: SGLang chooses the model's class by them, and vLLM by "
    'model_type, which makes an embedding model of most families; add "architectures": ["{wanted}"].',
    "architectures/unknown": "config.json names architectures {names}, which no class of transformers has: vLLM and "
    "SGLang choose the model's class by them; write the name of the model's class.",
    "config-dtype/float8": "config.json gives float8 as the dtype: loaders would cast every tensor to codes without "
    'scales; write "dtype": "bfloat16".',
    "config-dtype/none": 'config.json names no dtype, and most values are {most}: loaders would guess; add "dtype": '
    '"{most}".',
    "config-dtype/other": "config.json gives dtype {dtype}, and most values on disk are {most}: loaders round them "
    'while loading; write "dtype": "{most}" if that is not intended.',
    "companions/processor": "{folder.name} has no preprocessor_config.json, although the model takes images or sound; "
    "copy it from the model it was made from.",
    "companions/template": "{folder.name} has no chat template (chat_template.jinja): servers refuse chat requests; "
    "copy it from the model it was made from.",
    "no-end-token": "{folder.name} has a tokenizer without an end token: loaders take it, and stop only at the tokens "
    "in generation_config.json; copy tokenizer_config.json of the model it was made from.",
    "no-tokenizer": "{folder.name} has no tokenizer ({files}): servers cannot start from it; copy the tokenizer files "
    "of the model it was made from.",
    # Scales, and where codes may be
    "scale-missing": "is FP8 and has no scales {right!r}: its codes cannot be decoded, and servers load it without a "
    "word; export it again, or copy the scales from the checkpoint that it came from.",
    "scale-missing/input": "has no {wanted!r}, although quantization_config has static activations; export it with "
    "dynamic activations.",
    "scale-name": "holds the scales of {weight.name!r}; quant_method {q.method!r} reads {right!r} ({wrong} is "
    "{method!r}'s name): rename them, or write the config of the other method.",
    "scale-both": "holds scales of {weight.name!r}, and so does {scale.name!r}; remove this tensor, which "
    "quant_method {q.method!r} does not read.",
    "scale-transposed": "has shape {shape}, the transpose of the grid {wanted} for {weight.name!r} {of} in blocks of "
    "{what}; transpose it, or export again.",
    "scale-grid": "has shape {shape}, and {weight.name!r} {of} in blocks of {what} needs {wanted}{fits}; export it "
    "again, or correct the block in quantization_config.",
    "scale-dtype": "is {tensor.dtype}; scales are F32, BF16 or, with scale_fmt ue8m0, F8_E8M0: export again.",
    "scale-dtype/half": "is F16, whose smallest values round scales of ordinary weights; write F32.",
    "scale-dtype/no-scale-fmt": 'is F8_E8M0, but quantization_config has no "scale_fmt": "ue8m0", by which loaders '
    "recognize it; add it.",
    "scale-dtype/cache": "is {tensor.dtype}; a scale of a KV cache is F32, BF16 or F16: calibrate it again.",
    "cache-scales/none": "{file} has a kv_cache_scheme, and no file holds scales of a KV cache (k_scale, v_scale): "
    "servers cast keys and values with the scale 1; calibrate again, or remove kv_cache_scheme.",
    "cache-scales/no-scheme": "is one of {count} scales of an FP8 KV cache, and quantization_config has no "
    "kv_cache_scheme: servers keep the cache in 16 bits by default (vLLM: --kv-cache-dtype fp8); add it.",
    "cache-scales/half": "exists without {other!r}: servers cast the other half of the KV cache with the scale 1; "
    "calibrate again.",
    "cache-scales/layers": "is a scale of the KV cache, but {layer} has none ({count} such layers): servers cast its "
    "keys and values with the scale 1; calibrate again.",
    "cache-scales/stray": "is a scale of the KV cache of {layer}, but the folder has no such layer: use the scales "
    "that belong to the folder, or leave them out.",
    "autofp8": "{file} is in AutoFP8's layout (one weight_scale per tensor, {q.activations} activations), which vLLM "
    "and SGLang read; transformers looks for weight_scale_inv, and Octavo does not load such folders: for both, use "
    "compressed-tensors.",
    "scale-dangling": "has no weight: the weight was left out; export again.",
    "scale-dangling/input": "exists, although quantization_config has {q.activations} activations; remove it, or set "
    "activation_scheme to static.",
    "scale-dangling/value": "scales {weight!r}, which is {scaled.dtype} and not FP8: codes may have been cast without "
    "it; export again.",
    "router": "is the router of the experts in FP8: no loader dequantizes it, and it decides which expert runs; write "
    "it in BF16 and list it as not quantized.",
    "head": "is the output projection in FP8: vLLM and SGLang build it in high precision, without parameters for its "
    "scales; write it in BF16 and list it as not quantized.",
    "of-sound": "is FP8 in the {component}, which vLLM and SGLang run with transformers' modules, in high precision: "
    "for them export without --include {component}.",
    "stacked": "holds stacked experts in FP8; servers read FP8 experts one by one ({single!r}): export again.",
    "experts-apart": "is a single expert, as vLLM and SGLang read FP8; transformers reads this family's experts only "
    "stacked ({name!r}): for it, export in bf16, or load with octavo.",
    "fp8-elsewhere": "is FP8, but not the weight of a linear layer: no loader dequantizes it; write it in BF16.",
    "fp8-elsewhere/vector": "is FP8 with {dimensions} dimensions; only matrices are: write it in BF16.",
    "fused-mixed": "{name!r} in {file} is FP8 and {other.name!r} is {other.dtype}; vLLM and SGLang put them into one "
    "matrix, which cannot be both: quantize all of them, or none, and list them together.",
    "block-k": "has K = {k}, which is not a multiple of {c}: vLLM's and SGLang's kernels quantize activations in "
    "groups of {c}; keep this layer in BF16 and list it.",
    "block-n": "has N = {n}, not a multiple of {r}, and servers append another layer to it in one matrix, whose "
    "blocks would not match; keep the layers of this matrix in BF16 and list them.",
    "block-ragged": "has N = {n}, not a multiple of {r}: transformers on a CPU uses blocks of {rows} rows there, "
    "which raises an error or gives wrong values; keep it in BF16 if that matters.",
    "server": "{loader} {does}: {reason}; {fix}.",
    # Skip lists
    "skip-covers-fp8": "{name!r} is FP8 in {file}, but {who} leave{s} it unquantized by {key} in "
    "config.json{culprit}: its codes are no values, and its scales have no parameter; remove that entry, and write "
    "full names.",
    "skip-missing": "{name!r} is {dtype} in {file}, but {who} treat{s} it as FP8 and expect{s} its scales; add "
    "{layer.disk!r} to {key} in config.json.",
    "skip-nothing": "{entry!r} in {key} of config.json names nothing in this model; remove it, or correct it.",
    # Values
    "nan-codes": "holds {nans} NaN codes (0x7F or 0xFF): its layer returns NaN; export it again from finite weights.",
    "nan-values": "holds {bad} values that are NaN or infinite; write it again from finite weights.",
    "zero-block": "has {zero} of {blocks} blocks with only zeros, the first at {where}; this is correct if the weight "
    "is zero there, otherwise values were lost: export again.",
    "zero-weight": "is zero everywhere; this is correct for a layer that starts at zero, otherwise values were lost: "
    "write it again.",
    "codes-as-values": "is {tensor.dtype}, but each of its values is an E4M3 value, up to {peak:g}: FP8 codes were "
    "cast without their scales (as `.to(torch.bfloat16)` does); export again, dequantized.",
    "cast-through-fp8": "is {tensor.dtype}, but each of its values is an E4M3 value, up to {peak:g}: it was cast to "
    "FP8 without a scale and back, and small values are lost; write it again from the original.",
    "unscaled": "has only scales of 1, and its codes (largest {seen.code:g}) look like {how}: the scales were lost or "
    "never computed; export it again.",
    "reciprocal": "suspicion: it seems to hold reciprocals. {weight.name!r} reaches {seen.peak:.3g} with code * scale "
    "and {seen.inverse:.3g} with code / scale; scales are multipliers, even if they are called inv: store 1 / scale, "
    "or confirm it with --against.",
    "magnitude": "suspicion: it reaches {seen.peak:.3g} with its scales, beyond any trained weight; compare it with "
    "the original: --against.",
    "double-scaled": "suspicion: it reaches only {seen.peak:.3g} with its scales (other layers {peers:.3g}); they "
    "seem to be squared or applied twice (their roots give {seen.root:.3g}); export again, or confirm it with "
    "--against.",
    "unfilled": "suspicion: its largest codes are {seen.code:g}, while a scale from amax makes them 224 to 448; codes "
    "and scales seem to come from different casts; compare it with the original: --against.",
    "scale-unshared": "differs from the scales of the layers fused with it ({names}): vLLM and SGLang quantize them "
    "again with the largest, so the served weights differ from those on disk; export with one scale for all of them "
    "(fp8-tensor does).",
    # The reference
    "against-names/extra": "{name!r} in {file} is not in the reference: the reference is a different model, or this "
    "tensor was added; compare with the folder that this one was made from.",
    "against-names/missing": "{name!r} of the reference ({reference.file}) is missing here; export again.",
    "against-names/unplaced": "{name!r} of the reference ({reference.file}) is missing here, and the model of "
    "config.json has no place for it; use the config.json of the reference, or export again.",
    "against-names/untied": "{name!r} of the reference ({reference.file}) differs from the tensor that config.json "
    "ties it to, and is missing here; set tie_word_embeddings to false, and export again.",
    "against-dropped/missing": "{count} tensors of the reference that loaders leave out for this family are missing "
    "here ({names}): servers lose their prediction layers; copy them, or remove their count from config.json.",
    "against-dropped/extra": "{count} tensors that loaders leave out for this family are not in the reference "
    "({names}); compare with the folder that this one was made from.",
    "against-shape": "{name!r} in {file} is {shape} and {other} in the reference; compare with the folder that this "
    "one was made from.",
    "against-values": "{name!r} in {file} {much}, where a correct cast stays below {bound:.3g} ({worst}): a trained "
    "or merged model, the wrong reference, or damage; compare a trained model with its BF16 weights: RUN/hf, or what "
    "octavo merge RUN DIR --format bf16 writes.",
    "error": "{name!r} in {file} {much}, where a correct cast stays below {bound:.3g} ({worst}); {cause}; export it "
    "again.",
    "error/suspicious": "{name!r} in {file} has a row {ratio:.3g} times beyond the bound of one cast ({bound:.3g} of "
    "its norm): it may have been quantized twice; export it from the original.",
    # Adapters
    "config/base": "the base cannot be looked up (name it with --against): {error}",
    "config/key": "{file} has no {key}, without which PEFT cannot build the adapter; write it again.",
    "config/peft-type": "{file} has peft_type {peft_type!r}; Octavo supports only LORA.",
    "config/targets": "{file} has target_modules {targets!r} and rank_pattern {patterns!r}, which are not names or "
    "regular expressions; write the adapter again.",
    "config/rank": "{file} has r = {rank!r}, which is not a rank; write the adapter again.",
    "adapter-empty": "{folder.name}/{file} contains no lora_A and lora_B; save the adapter with save_pretrained.",
    "adapter-names": "is not PEFT's name of a factor (base_model.model.X.lora_A.weight); save the adapter with "
    "save_pretrained.",
    "adapter-half": "has no {missing} for the same layer; save the adapter again.",
    "adapter-shape": "is {shape} and {b.name!r} {other}: they have no rank in common ([r, K] and [N, r]); save the "
    "adapter again.",
    "adapter-shape/base": "adds [{rows}, {columns}] to {module!r}, which is {wanted} in {base.name}; name the base "
    "that it was trained on with --against.",
    "adapter-target": "adapts {layer}, which target_modules of adapter_config.json do not select: PEFT leaves it out "
    "and only warns; use the config that belongs to it.",
    "adapter-rank": "has rank {tensor.shape[0]}, but adapter_config.json has {rank}: PEFT scales by alpha / r of the "
    "config; use the config that belongs to it.",
    "adapter-dtype": "is {tensor.dtype}; factors are F32, BF16 or F16 (PEFT casts them to the base's FP8 with "
    "autocast_adapter_dtype=False): train and save them in one of these.",
    "adapter-layer": "belongs to {module!r}, which the base {base.name} does not have; name the base that it was "
    "trained on with --against.",
    "adapter-base": "{file} has no base_model_name_or_path: the adapter's base is unknown; add the name of the base.",
    "adapter-untrained": "is zero, as is every lora_B: the adapter adds nothing; save it after training.",
}
