"""`octavo plan` for several ranks: FLOPs, communication volume, and on a cluster the step time and the best mesh."""

from __future__ import annotations

import json

from octavo.cli.main import main
from octavo.models.tiny import tiny

PLAN = ["plan", "--shape", "llama2_7b"]
ROWS = ["data.packing=true", "train.micro_batch=1", "train.seq_length=1024", "train.global_batch=64"]


def test_flops_and_bytes_of_a_mesh(capsys) -> None:
    axes = ["--ranks", "8", "--parallel", "replicate=2,shard=2,context=2", "--json"]
    assert main([*PLAN, *axes, *ROWS, "optimizer.master=bf16+sr", "fp8.recipe=off"]) == 0
    result = json.loads(capsys.readouterr().out)
    step = result["step_of_a_rank"]
    assert step["mesh"] == {"replicate": 2, "shard": 2, "context": 2, "expert": 1, "ulysses": 2}
    blocks = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    root = 2 * 32000 * 4096 + 4096
    assert step["wire"] == {
        "gather": 3 * 2 * (2 * blocks + root) // 4,  # BF16, a quarter per rank
        "reduce": 3 * 2 * (blocks + root) // 4,
        "sum": 2 * 2 * (blocks + root) // 4 // 2,
        "ulysses": 32 * 2 * (2 * 64 * 128) * 2 * 512 // 2,
    }
    per_token = 6 * (blocks - 64 * 4096 + 32000 * 4096) + 6 * 32 * 4096 * 1024
    assert step["flops"]["model"] == 512 * per_token
    assert result["memory"]["per_rank"]["ranks"] == 8


def test_cluster_prints_times_and_the_best_mesh(capsys) -> None:
    words = [*PLAN, "--cluster", "h100x8x1", *ROWS, "optimizer.states=fp8", "fp8.recipe=off"]
    assert main(words) == 0
    out = capsys.readouterr().out
    for message in (
        "bytes to each rank",
        "gather",
        "overlapped",
        "tokens/s per GPU",
        "not measured by this project",
        "best",
        "does not fit",
    ):
        assert message in out
    assert main([*PLAN, "--ranks", "8", *ROWS, "fp8.recipe=off"]) == 0
    assert "tokens/s" not in capsys.readouterr().out  # times need a cluster


def test_contradictory_meshes_are_rejected(capsys) -> None:
    for words, message in (
        (["--ranks", "4", "--cluster", "h100x8x1"], "contradict each other: that cluster has 8 GPUs"),
        (["--parallel", "shard=8"], "add their number, e.g. --ranks 64"),
        (["--ranks", "8", "--parallel", "shards=8"], "axes are replicate, shard, context, ulysses, expert"),
        (["--ranks", "8", "--parallel", "context=2,context=4"], "expected each axis once, found context twice"),
        (["--cluster", "h100"], "(did you mean h100x8x8?): give the GPU, the number per node"),
        (["--ranks", "8", "--parallel", "expert=8"], "LlamaForCausalLM has no experts that are stacked"),
        (["--ranks", "8", "--parallel", "context=3,shard=1,replicate=1"], "but there are 8 ranks"),
        (["--ranks", "6", "--parallel", "context=6,ulysses=6"], "ulysses is 6, which does not divide the model's 32"),
        (
            ["--ranks", "2", "--parallel", "context=2", "train.exchange=fp8", "fp8.recipe=off"],
            "no layer casts exchanged",
        ),
        (
            ["--ranks", "8", "--parallel", "shard=3"],
            "parallel has replicate: 1 and shard: 3, but there are 8",
        ),
    ):
        try:
            code = main([*PLAN, *words])
        except SystemExit as stop:  # from argparse
            code = int(str(stop.code))
        assert code in (1, 2) and message in capsys.readouterr().err


def test_plan_rejects_experts_that_cannot_be_distributed(tmp_path, capsys) -> None:
    model, file = tiny.write("qwen3_moe", tmp_path / "model", size="mini"), tmp_path / "run.yaml"
    (tmp_path / "a.json").write_text("[]")
    file.write_text(f"model: {{path: {model}}}\ndata: {{train: [{{path: a.json}}]}}\ntrain: {{steps: 1}}\n")
    for options, message in (
        (["--ranks", "3", "--parallel", "expert=3"], "8 experts are not a multiple of the 3 ranks"),
        (["--ranks", "2", "--parallel", "expert=2", "fp8.recipe=delayed"], "keeps an amax history per expert"),
    ):
        assert main(["plan", str(file), *options]) == 1 and message in capsys.readouterr().err
