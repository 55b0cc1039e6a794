"""Every finding's sentence, by its kind; `kind/case` where a kind has several.

Of a tensor (`held`, its `shape`) the sentence begins with "'NAME' in FILE"; of a file, `file` and `name` are that file
and the tensor in question. All other values are given by the check that finds it.
"""

SENTENCES: dict[str, str] = {
    # Files
    "no-weights": "{folder} holds no {single.name} and no {index.name}: there are no weights to load.",
    "only-pickles": "{file} is a pickle, which can run code when it is read, and there are no safetensors beside it; "
    "save the model with save_pretrained (safetensors is its format).",
    "pickle-beside": "{file} is a pickle beside the safetensors ({count} such files): no loader here needs it; delete "
    "it.",
    "two-layouts": "{folder.name} holds both {single.name} and {file}: transformers reads the single file, vLLM what "
    "the index names; delete the one that is old.",
    "extra-shard/beside": "{file} stands beside {single.name} without an index: transformers leaves it out, vLLM and "
    "SGLang read both; delete the one that is old.",
    "extra-shard/unnamed": "{file} is not named by {index.name}: loaders leave it out; delete it, or write the index "
    "again.",
    "missing-shard": "{file} is missing, though {index.name} places {name!r} and {more} more tensors in it; download "
    "the shard again.",
    "index-tensor": "{file} lacks {name!r}, which {index.name} places in it; download both again.",
    "index-entry/elsewhere": "{file} places {name!r} in {shard}, but {held.file} holds it; write the index again.",
    "index-entry/none": "has no entry in {index.name}: who reads by the index misses it; write the index again.",
    "duplicate": "is in {first.file} too: which one is loaded depends on the loader; keep the one that belongs and "
    "write the index again.",
    "duplicate/stacked": "{file} holds the experts stacked as {name!r}, and {other.file} one by one ({single!r}); "
    "keep one of them.",
    "adapter-beside": "{file} stands beside a model, and transformers would load the model that it names; move it into "
    "a folder of its own.",
    "name": "{file!r} is a name with control characters, which a terminal obeys; rename the file.",
    "special": "{file} is {what}, not a file: who copies or loads the folder may wait for ever; remove it.",
    "link/broken": "{file} is a link to {target}, and nothing can be read there ({why}); put the file in its place.",
    "link/outside": "{file} is a link out of the folder, to {target}: a copy of the folder lacks it; put the file in "
    "its place.",
    "encrypted": "{file} is encrypted ({count} such files), which no loader opens; octavo decrypt {folder} where it is "
    "to be loaded.",
    "sum/missing": "{file} is missing, though the export wrote it; export the folder anew.",
    "sum/shard": "{file} is not what the export wrote: its SHA-256 is another; export or copy it again.",
    "sum/other": "{file} was changed after the export wrote it.",
    "export-note/changed": "{file} was changed after the export wrote it, so its checksums of the other files prove "
    "nothing; export the folder again.",
    "template": "{file}: {said}",
    "token-ids": "{file} has tokens up to number {largest}, and the model {rows} rows of embeddings: those above "
    "cannot be embedded; take the tokenizer that belongs to the model.",
    "letters": "{file} has no token for {count} letters and digits of ASCII (first {first}): they vanish from texts; "
    "take the tokenizer that belongs to the model.",
    "end-token": "{file} stops at {stated}, and the chat template ends answers with {end}: a model that learned the "
    "template runs on until the limit; write eos_token_id {ends}.",
    "end-token-of-tokenizer": "{file} stops at {stated}, and the chat template ends answers with {end}, the "
    "tokenizer's end token: transformers runs on until the limit, servers stop; write eos_token_id {ends}.",
    "config/empty": "{file} is an empty object: it describes no model; take the one that belongs to the weights.",
    # Names, shapes and config.json
    "own-family": "{file} is of model_type {family!r}, for which transformers has no class: its Auto classes load the "
    "folder once octavo is imported, and a server needs code of its own for it.",
    "mpt-fields": "{file} is of an MPT as LLM-Foundry trains it: {fields} are read by LLM-Foundry and Octavo, and left "
    "out without a word by transformers' class of that name.",
    "missing": "{name!r} {wanted} is in no file of {folder.name}: transformers would fill it with random numbers and "
    "only warn; write the checkpoint again, or take the config.json that belongs to it.",
    "extra": "is {shape}, and the model of config.json does not have it; take the config.json that belongs to these "
    "weights, or write them without it.",
    "shape": "has shape {shape} where the model of config.json has {wanted}{hint}; write it again, or take the "
    "config.json that belongs to these weights.",
    "dtype": "is {held.dtype}; weights are BF16, F16, F32 or FP8 codes (F8_E4M3): write it again in one of them.",
    "e5m2": "is F8_E5M2, and loaders take weights in F8_E4M3 alone; quantize it again.",
    "tied": "differs from {one.name!r}, though config.json ties them (tie_word_embeddings): loaders keep one of the "
    "two; set tie_word_embeddings to false, or write the folder without it.",
    "tied-twice": "repeats {one.name!r}, which config.json ties it to: it costs {held.size} bytes for nothing; write "
    "the folder without it.",
    "quantization-lost/none": "config.json has no quantization_config, but {count} tensors are FP8 codes, e.g. "
    "{name!r} in {file} and no scales are there: loaders would take codes for values. Put the quantization_config "
    "back (the export that wrote the codes has it), or export the model again.",
    "quantization-lost/scales": "config.json has no quantization_config, but {count} tensors are FP8 codes, e.g. "
    "{name!r} in {file}; their scales are there: loaders would take codes for values. Put the quantization_config "
    "back (the export that wrote the codes has it), or export the model again.",
    "quantization-without-codes": "config.json has a quantization_config, but no tensor is FP8: vLLM and SGLang would "
    "wait for scales; remove the block from config.json, or write the quantized weights.",
    "architectures": "config.json names no architectures: vLLM and SGLang choose the model's class by it; add e.g. "
    '"architectures": ["Qwen3ForCausalLM"].',
    "config-dtype/float8": "config.json gives float8 as the dtype: loaders would cast every tensor to codes without "
    'scales; write "dtype": "bfloat16".',
    "config-dtype/none": 'config.json names no dtype, and most values are {most}: loaders would guess; add "dtype": '
    '"{most}".',
    "config-dtype/other": "config.json gives dtype {dtype}, and most values on disk are {most}: loaders round them "
    'while loading; write "dtype": "{most}" if that is not meant.',
    "companions/processor": "{folder.name} has no preprocessor_config.json, though the model takes images or sound; "
    "copy it from the model it was made from.",
    "companions/template": "{folder.name} has no chat template (chat_template.jinja): servers refuse chat requests; "
    "copy it from the model it was made from.",
    "companions/tokenizer": "{folder.name} has no tokenizer ({files}): servers cannot start from it; copy the "
    "tokenizer files of the model it was made from.",
    # Scales, and where codes may be
    "scale-missing": "is FP8 and has no scales {right!r}: loaders would take codes for values; export it again, or "
    "copy the scales from the checkpoint that it came from.",
    "scale-missing/input": "has no {wanted!r}, though quantization_config says that activations have fixed scales; "
    "export it with dynamic activations.",
    "scale-name": "holds the scales of {weight.name!r}; quant_method {q.method!r} reads {right!r} ({wrong} is "
    "{method!r}'s name): rename them, or write the config of the other method.",
    "scale-both": "holds scales of {weight.name!r}, and so does {scale.name!r}; remove the former, which quant_method "
    "{q.method!r} does not read.",
    "scale-transposed": "has shape {shape}, the transpose of the grid {wanted} of {weight.name!r} {of} in blocks of "
    "{what}; transpose it, or export again.",
    "scale-grid": "has shape {shape}, and {weight.name!r} {of} in blocks of {what} needs {wanted}{fits}; export it "
    "again, or correct the block in quantization_config.",
    "scale-dtype": "is {held.dtype}; scales are F32, BF16 or, with scale_fmt ue8m0, F8_E8M0: export again.",
    "scale-dtype/half": "is F16, whose smallest values round scales of ordinary weights; write F32.",
    "scale-dtype/unsaid": 'is F8_E8M0, and quantization_config lacks "scale_fmt": "ue8m0", by which loaders know it; '
    "add it.",
    "scale-dtype/cache": "is {held.dtype}; a scale of a KV cache is F32, BF16 or F16: calibrate it again.",
    "cache-scales/none": "{file} has a kv_cache_scheme, and no file holds scales of a KV cache (k_scale, v_scale): "
    "servers cast keys and values with the scale 1; calibrate again, or take kv_cache_scheme out.",
    "cache-scales/no-scheme": "is one of {count} scales of an FP8 KV cache, and quantization_config has no "
    "kv_cache_scheme: servers keep the cache in 16 bits unless told otherwise (vLLM: --kv-cache-dtype fp8); add it.",
    "cache-scales/half": "has no {other!r} beside it: servers cast the other half of the KV cache with the scale 1; "
    "calibrate again.",
    "cache-scales/layers": "is a scale of the KV cache, and {layer} has none ({count} such layers): servers cast its "
    "keys and values with the scale 1; calibrate again.",
    "cache-scales/stray": "is a scale of the KV cache of {layer}, and the folder has no such layer: take the folder's "
    "own scales, or leave them out.",
    "autofp8": "{file} is in AutoFP8's layout (one weight_scale a tensor, {q.activations} activations), which vLLM and "
    "SGLang read; transformers looks for weight_scale_inv, and Octavo loads no such folder: for both, take one of "
    "compressed-tensors.",
    "scale-dangling": "has no weight beside it: the weight was left out; export again.",
    "scale-dangling/input": "is there, and quantization_config has {q.activations} activations; remove it, or write "
    "activation_scheme static.",
    "scale-dangling/value": "scales {weight!r}, which is {scaled.dtype} and no code: codes may have been cast without "
    "it; export again.",
    "router": "is the router of the experts in FP8: no loader reads codes there, and it decides which expert runs; "
    "write it in BF16 and list it among the layers that are not quantized.",
    "head": "is the output projection in FP8: vLLM and SGLang read it in high precision and would take codes for "
    "values; write it in BF16 and list it as not quantized.",
    "of-sound": "is FP8 and of the {component}, which vLLM and SGLang run by transformers' own modules, in high "
    "precision: for them export without --include {component}.",
    "stacked": "holds stacked experts in FP8; servers read FP8 experts one by one ({single!r}): export again.",
    "experts-apart": "is an expert by itself, as vLLM and SGLang read FP8; transformers reads this family's experts "
    "stacked alone ({name!r}): for it, export in bf16, or load with octavo.",
    "fp8-elsewhere": "is FP8, and it is no linear layer's weight: no loader dequantizes it; write it in BF16.",
    "fp8-elsewhere/vector": "is FP8 with {dimensions} dimensions; only matrices are: write it in BF16.",
    "fused-mixed": "{name!r} in {file} is FP8 and {other.name!r} is {other.dtype}; vLLM and SGLang put them into one "
    "matrix and refuse it: quantize all of them, or none, and list them together.",
    "block-k": "has K = {k}, which is no multiple of {c}: vLLM's and SGLang's kernels quantize activations in groups "
    "of {c}; keep this layer in BF16 and list it.",
    "block-n": "has N = {n}, no multiple of {r}, and servers put another layer below it in one matrix, whose blocks "
    "would not match; keep the layers of this matrix in BF16 and list them.",
    "block-ragged": "has N = {n}, no multiple of {r}: transformers on a CPU takes blocks of {rows} rows there, an "
    "error or wrong values; keep it in BF16 if that matters.",
    # Skip lists
    "skip-covers-fp8": "{name!r} is FP8 in {file}, but {who} leave{s} it unquantized by {key} in "
    "config.json{culprit}, and would take its codes for values; take that entry out, and write full names.",
    "skip-missing": "{name!r} is {dtype} in {file}, but {who} take{s} it for FP8 and wait{s} for its scales; add "
    "{layer.disk!r} to {key} in config.json.",
    "skip-nothing": "{entry!r} in {key} of config.json names nothing in this model; take it out, or correct it.",
    # Values
    "nan-codes": "holds {nans} NaN codes (0x7F or 0xFF): its layer answers NaN; export it again from weights that are "
    "finite.",
    "nan-values": "holds {bad} values that are NaN or infinite; write it again from weights that are finite.",
    "zero-block": "has {zero} of {blocks} blocks of zeros only, the first at {where}; right where the weight is zero "
    "there, else it was lost: export again.",
    "zero-weight": "is zero everywhere; right for a layer that starts at zero, else it was lost: write it again.",
    "codes-as-values": "is {held.dtype}, but each of its values is an E4M3 value, up to {peak:g}: FP8 codes were cast "
    "without their scales (as `.to(torch.bfloat16)` does); export again, dequantized.",
    "cast-through-fp8": "is {held.dtype}, but each of its values is an E4M3 value, up to {peak:g}: it was cast to FP8 "
    "without a scale and back, and small values are lost; write it again from the original.",
    "unscaled": "has no scale but 1, and its codes (largest {seen.code:g}) look like {how}: the scales were lost or "
    "never made; export it again.",
    "reciprocal": "looks like reciprocals, a suspicion: {weight.name!r} reaches {seen.peak:.3g} with code * scale and "
    "{seen.inverse:.3g} with code / scale; scales are multipliers, also where they are called inv: store 1 / scale, "
    "or make it sure with --against.",
    "magnitude": "reaches {seen.peak:.3g} with its scales, beyond any trained weight, a suspicion; compare it with "
    "the original: --against.",
    "double-scaled": "reaches only {seen.peak:.3g} with its scales (other layers {peers:.3g}), a suspicion that they "
    "were squared or applied twice (their roots give {seen.root:.3g}); export again, or make it sure with --against.",
    "unfilled": "has {seen.code:g} as its largest codes where a scale from amax makes them 224 to 448, a suspicion "
    "that codes and scales are of different casts; compare it with the original: --against.",
    "scale-unshared": "differs from its neighbours' ({names}): vLLM and SGLang fuse these layers and quantize them "
    "again under the largest, so that what they serve is not what is on disk; export with one scale for all of them "
    "(fp8-tensor does).",
    # The reference
    "against-names/extra": "{name!r} in {file} is not in the reference: it is another model's folder, or was added; "
    "compare with the folder that this one was made from.",
    "against-names/missing": "{name!r} of the reference ({there.file}) is missing here; export again.",
    "against-names/unplaced": "{name!r} of the reference ({there.file}) is missing here, and the model of config.json "
    "has no place for it; take the config.json of the reference, or export again.",
    "against-names/untied": "{name!r} of the reference ({there.file}) is not the tensor that config.json ties it to: "
    "it is missing here; set tie_word_embeddings to false, and export again.",
    "against-dropped/missing": "{count} tensors of the reference that loaders leave out for this family are missing "
    "here ({names}): prediction layers of servers are lost; copy them, or take their count out of config.json.",
    "against-dropped/extra": "{count} tensors that loaders leave out for this family are not in the reference "
    "({names}); compare with the folder that this one was made from.",
    "against-shape": "{name!r} in {file} is {shape} and {other} in the reference; compare with the folder that this "
    "one was made from.",
    "against-values": "{name!r} in {file} {much}, where a correct cast stays below {bound:.3g} ({worst}): a trained or "
    "merged model, the wrong reference, or damage; compare with the folder that this one was made from.",
    "error": "{name!r} in {file} {much}, where a correct cast stays below {bound:.3g} ({worst}); {cause}; "
    "export it again.",
    "error/suspicious": "{name!r} in {file} has a row {ratio:.3g} times beyond the bound of one cast ({bound:.3g} of "
    "its norm): it may have been quantized twice; export it from the original.",
    # Adapters
    "config/base": "the base cannot be looked up (name it with --against): {error}",
    "config/key": "{file} lacks {key}, without which PEFT cannot rebuild it; write it again.",
    "config/peft-type": "{file} has peft_type {peft_type!r}; Octavo knows LORA alone.",
    "config/targets": "{file} has target_modules {targets!r} and rank_pattern {patterns!r}: names, expressions belong "
    "there; write the adapter again.",
    "config/rank": "{file} has r = {rank!r}, no rank; write the adapter again.",
    "adapter-empty": "{folder.name}/{file} holds no lora_A and lora_B; save the adapter with save_pretrained.",
    "adapter-names": "is not PEFT's name of a factor (base_model.model.X.lora_A.weight); save the adapter with "
    "save_pretrained.",
    "adapter-half": "has no {lacks} beside it; save the adapter again.",
    "adapter-shape": "is {shape} and {b.name!r} {other}: they have no rank in common ([r, K] and [N, r]); save the "
    "adapter again.",
    "adapter-shape/base": "adds [{rows}, {columns}] to {module!r}, which is {wanted} in {base.name}; name the "
    "base that it was trained on with --against.",
    "adapter-target": "adapts {layer}, to which target_modules of adapter_config.json do not lead: PEFT leaves it out "
    "and only warns; take the config that belongs to it.",
    "adapter-rank": "has rank {held.shape[0]}, and adapter_config.json says {rank}: PEFT scales by alpha / r of the "
    "config; take the config that belongs to it.",
    "adapter-dtype": "is {held.dtype}; factors are F32, BF16 or F16 (PEFT casts them to the base's FP8 with "
    "autocast_adapter_dtype=False): train and save them in one of these.",
    "adapter-layer": "belongs to {module!r}, which the base {base.name} does not have; name the base that it was "
    "trained on with --against.",
    "adapter-base": "{file} names no base_model_name_or_path: nobody can tell what it belongs to; add the base's name.",
    "adapter-untrained": "is zero, as is every lora_B: the adapter adds nothing; save it after training.",
}
