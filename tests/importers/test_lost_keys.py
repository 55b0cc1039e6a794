"""Keys that decide numbers and have no translation: exit code 4, the last line, the report, --json and --allow-lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.config.yaml.problems import Place
from octavo.importers import FRAMEWORKS, lost_keys, translate
from octavo.importers.common.key_outcomes import Row
from octavo.importers.source.keys import SourceKey

PLAIN = "model_name_or_path: ./m\nstage: sft\nfinetuning_type: full\ndataset: a\ntemplate: qwen3\ncutoff_len: 64\n"
PLAIN += "max_steps: 10\noutput_dir: x\nlogging_steps: 5\noverwrite_cache: true\npreprocessing_num_workers: 16\n"
PLAIN += "ddp_timeout: 180000000\ntrust_remote_code: true\nplot_loss: true\nreport_to: none\nuse_dft_loss: false\n"


def test_exit_code_4_and_last_line_report_lost_keys(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    asks = ["import", "a.yaml", "-o", "o.yaml", "--force"]
    for more, names in (
        ("", []),
        ("optim: lion_8bit\n", ["optim"]),
        ("lr_scheduler_type: polynomial\nval_size: 0.1\nlearnig_rate: 1e-4\n",
         ["lr_scheduler_type", "val_size", "learnig_rate"]),
    ):  # fmt: skip
        (tmp_path / "a.yaml").write_text(PLAIN + more)
        assert main(asks) == (4 if names else 0)
        last = capsys.readouterr().out.rstrip().split("\n")[-1]
        line = {
            0: "",
            1: "1 key that affects training was not translated",
            3: "3 keys that affect training were not translated",
        }[len(names)]
        assert last == f"{line}: {', '.join(names)}" if names else "lost" not in last
        assert main([*asks, "--json", "--allow-lost"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["lost"], report["lost_line"]) == (names, line)
        assert (
            "keys that affect training were not translated" in (page := (tmp_path / "o.report.md").read_text())
        ) == (len(names) > 1)
        assert all(f"- `{name}`" in page for name in names)


def test_invalid_translation_exits_with_1_despite_lost_keys(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(PLAIN + "learning_rate: -1\nval_size: 0.1\n")
    assert main(["import", "a.yaml", "-o", "o.yaml", "--allow-lost"]) == 1
    assert capsys.readouterr().out.rstrip().endswith("1 key that affects training was not translated: val_size")


def test_unset_script_variables_count_as_lost_if_they_affect_training(tmp_path: Path) -> None:
    run = "swift sft --model $MODEL --dataset org/d --max_length 64 --max_steps 4 --torch_dtype bfloat16 "
    run += "--learning_rate $LR --output_dir $OUT --master_port $PORT\n"
    (tmp_path / "a.sh").write_text("export PYTHONPATH=$HERE:$THERE\nNPROC_PER_NODE=$GPUS " + run)
    made = translate([tmp_path / "a.sh"], tmp_path / "o.yaml", root=tmp_path)
    assert set(made.lost_keys) == {"model", "learning_rate", "$NPROC_PER_NODE"}
    known = translate([tmp_path / "a.sh"], tmp_path / "o.yaml", root=tmp_path, world=8, variables={"LR": "1e-4"})
    assert known.lost_keys == ("model",)


def test_variables_changed_by_skipped_lines_count_as_unset(tmp_path: Path) -> None:
    run = "swift sft --model ./m --dataset org/d --max_length 64 --max_steps 4 --learning_rate $LR --output_dir $OUT\n"
    line = '[ "$BIG" = 1 ] && { LR=1e-3; OUT=big; }\n'
    (tmp_path / "a.sh").write_text(f"LR=1e-5\nOUT=small\n{line}{run}")
    made = translate([tmp_path / "a.sh"], tmp_path / "o.yaml", root=tmp_path, world=1)
    assert made.lost_keys == ("learning_rate",)
    assert made.notes and any("a.sh:3 is not evaluated and may change learning_rate" in note for note in made.notes)
    (tmp_path / "a.sh").write_text(f"LR=1e-5\nOUT=small\nBIG=0\n{line}{run}")
    assert translate([tmp_path / "a.sh"], tmp_path / "o.yaml", root=tmp_path, world=1).lost_keys == ()


DECIDE = """
learning_rate lr lr_groups.0.lr optimizer optim training.lr_scaling_plan.x neftune_noise_alpha use_galore rope_scaling
label_names loss_type use_dft_loss moe_z_loss_coeff attention_dropout hidden_dropout weight_decay_incr_style
chat_template_jinja eot_tokens special_tokens.eos_token additional_target modules_to_save group_by_length
mm_projector_lr vision_tower_lr vit_lr mtp_num_layers fp8_margin decoupled_lr val_size split_dataset_ratio
train_loader.dataset.streams.a.proportion config_file resume_from_checkpoint freeze_parameters_regex
"""
NO_EFFECT_ON_TRAINING = """
logging_steps wandb_project report_to save_steps output_dir overwrite_cache dataloader_num_workers ddp_timeout
deepspeed_autotp_size tensor_model_parallel_size eval_steps gradient_checkpointing_kwargs gpt_args.recompute_method
model.text_decoder.num_layers tokenizer_type trust_remote_code template gpt_args.log_tps use_liger_kernel
training.manual_gc_interval overlap_grad_reduce train_loader.num_workers load_in_fp8_offload vllm_gpu_memory
"""


@pytest.mark.parametrize("key", DECIDE.split())
def test_key_that_affects_training_counts(key: str) -> None:
    for kind in ("none", "unknown"):
        assert lost_keys.is_lost(Row(SourceKey(key, 0.5, Place("a", 1)), kind))
        assert not lost_keys.is_lost(Row(SourceKey(key, False, Place("a", 1)), kind))  # it asks for nothing
    assert not lost_keys.is_lost(Row(SourceKey(key, 0.5, Place("a", 1)), "translated"))
    assert lost_keys.is_lost(Row(SourceKey(key, "$X", Place("a", 1), ("X",)), "none"))


@pytest.mark.parametrize("key", NO_EFFECT_ON_TRAINING.split())
def test_key_without_effect_on_training_does_not_count(key: str) -> None:
    assert not lost_keys.is_lost(Row(SourceKey(key, 7, Place("a", 1)), "none"))


def test_disabled_shuffling_counts() -> None:
    assert lost_keys.is_lost(Row(SourceKey("dataset_shuffle", False, Place("a", 1)), "none"))


def test_examples_lose_no_key(tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parents[2] / "examples" / "import"
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".yaml", ".sh") and p.name != "loongforge.sh"):
        more = [folder / "loongforge.sh"] if path.name == "loongforge.yaml" else []
        made = translate([path, *more], tmp_path / "o.yaml", root=tmp_path)
        assert made.lost_keys == () and made.framework in FRAMEWORKS, path.name
