"""Data sets without a row to train on end the run before its first step, with the settings that help."""

import json

import pytest

from octavo.data import BadSample, DataError, Encoder, EvalSet, LabelledEncoder, Loader, Mixture, PairEncoder
from octavo.data.loaders import usable_rows
from octavo.data.loaders.usable_rows import check_held_out_rows, check_training_rows
from octavo.data.tasks.prompts import PromptEncoder

PROMPT = "why " * 30


def loader(sources, encoder, **options):
    return Loader(Mixture(sources, seed=3), encoder, 1, 2, **options)


def refusal(check, *arguments) -> str:
    with pytest.raises(DataError) as refused:
        check(*arguments)
    return str(refused.value)


def long_rows(folder, lengths, name="long.json"):
    return folder.read([folder.llava("word " * n, "answer " * n) for n in lengths], name)


def test_shortest_length_is_named_and_suffices(models, folder, tmp_path):
    processor, report = models("qwen3"), tmp_path / "skipped.jsonl"
    source = long_rows(folder, (40, 25, 300))
    message = refusal(check_training_rows, loader([source], Encoder(processor, 16), report_path=report))
    needed = min(len(Encoder(processor, 4096).encode(source[row]).input_ids) for row in range(3))
    assert f"none of its 3 rows fits into train.seq_length: 16; the shortest has {needed} tokens" in message
    lengths = [len(Encoder(processor, 4096).encode(source[row]).input_ids) for row in range(3)]
    most = sorted(lengths)[1]  # the third is not measured: it is more than four times as long as the limit
    assert f"Set train.seq_length to {needed} or more ({most} for 2 of 3)" in message
    assert len(message) < 300
    assert sorted(json.loads(line)["row"] for line in report.read_text().splitlines()) == [0, 1, 2]
    ranks = [loader([source], Encoder(processor, 16), rank=rank, world=4) for rank in range(4)]
    assert {refusal(check_training_rows, of_rank) for of_rank in ranks} == {message}, (
        "all ranks end, with or without rows"
    )
    check_training_rows(loader([source], Encoder(processor, needed)))
    refusal(check_training_rows, loader([source], Encoder(processor, needed - 1)))


def test_cut_is_advised_only_where_it_helps(models, folder):
    processor, source = models("qwen3"), long_rows(folder, (40,))
    cut = refusal(check_training_rows, loader([source], Encoder(processor, 16, on_long="cut")))
    assert "data.on_long: cut leaves no token to learn. Set train.seq_length to" in cut and "to cut" not in cut
    dropped = refusal(check_training_rows, loader([source], Encoder(processor, 16)))  # the prompt fills the length
    assert "data.on_long: cut leaves no token to learn. Set train.seq_length to" in dropped and "to cut" not in dropped
    answer = folder.read([folder.llava("a", "answer " * 40)], "answer.json")
    assert "or more, or data.on_long to cut" in refusal(check_training_rows, loader([answer], Encoder(processor, 16)))
    check_training_rows(loader([answer], Encoder(processor, 16, on_long="cut")))
    check_training_rows(loader([source], Encoder(processor, 16, on_long="cut", train_on_prompt=True)))
    with pytest.raises(DataError, match="set data.on_long to drop or cut"):
        check_training_rows(loader([source], Encoder(processor, 16, on_long="error")))
    prompts = folder.read([{"prompt": PROMPT, "answer": "yes"}], "prompts.json", "prompts")
    encoder = PromptEncoder(processor, 48, reserve=32)
    message = refusal(check_training_rows, loader([prompts], encoder))
    needed = len(PromptEncoder(processor, 512).encode(prompts[0]).input_ids) + 32
    assert "48 (32 of them for the answer)" in message and "no cut for prompts" in message
    assert f"Set train.seq_length to {needed} or more, or lower rl.max_new_tokens" in message


def test_preferences_need_room_for_both_answers(models, folder):
    processor = models("qwen3")
    pairs = folder.read([{"prompt": "a", "chosen": "b", "rejected": "c " * 50}], "pairs.json", "pairs")
    longest = len(PairEncoder(processor, 512).encode(pairs[0]).rejected.input_ids)
    message = refusal(check_training_rows, loader([pairs], PairEncoder(processor, 32)))
    assert f"the shortest has {longest} tokens" in message
    labelled = folder.read([{"prompt": PROMPT, "completion": "b", "label": True}], "kto.json", "labelled")
    assert "Set train.seq_length" in refusal(check_training_rows, loader([labelled], LabelledEncoder(processor, 16)))


def test_images_that_are_too_large_name_their_limit(models, folder):
    source = folder.read([folder.llava("<image>What?", "a", image=folder.image(size=(256, 256)))])
    message = refusal(check_training_rows, loader([source], Encoder(models("qwen3_vl"), 24)))
    assert "lower data.max_pixels" in message and "Set train.seq_length to" in message


def test_mixture_needs_rows_of_every_data_set(models, folder):
    short = folder.read([folder.llava("a", "b")] * 5, "short.json")
    encoder = Encoder(models("qwen3"), 32)
    assert "long.json: none of its 2 rows" in refusal(
        check_training_rows, loader([short, long_rows(folder, (50, 60))], encoder)
    )
    assert "long.json: none of its 2 rows" in refusal(
        check_held_out_rows, EvalSet([short, long_rows(folder, (50, 60))], encoder, 1)
    )
    check_held_out_rows(EvalSet([short, long_rows(folder, (50, 60))], encoder, 1, max_rows=5))  # only the short ones
    both = loader([long_rows(folder, (50, 60)), short, long_rows(folder, (70,), "longer.json")], encoder)
    first, second = refusal(check_training_rows, both).splitlines()
    assert "long.json: none of its 2 rows" in first and "longer.json: none of its 1 row fits" in second


def test_one_row_is_read_where_it_can_be_used_and_a_sample_elsewhere(models, folder, monkeypatch):
    read: list[int] = []

    class Counting(Encoder):
        def encode_all(self, rows):
            read.extend(row.row for row in rows)
            return super().encode_all(rows)

    encoder = Counting(models("qwen3"), 32)
    check_training_rows(loader([folder.read([folder.llava("a", "b")] * 50, "short.json")], encoder))
    assert len(read) == 1
    monkeypatch.setattr(usable_rows, "MAX_ROWS", 40)
    monkeypatch.setattr(usable_rows, "MEASURED_ROWS", 2)
    rows = long_rows(folder, [50] * 60)
    read.clear()
    message = refusal(check_training_rows, loader([rows], encoder))
    assert "none of the first 40 rows that are read fits" in message and "the shortest of 2 has" in message
    assert len(set(read)) == 40
    mixed = [folder.llava("word " * 50, "a")] * 30 + [folder.llava("a", "b")]  # one row can be used
    check_training_rows(loader([folder.read(mixed, "mixed.json")], encoder))


def test_bad_rows_and_long_rows_have_separate_counts(models, folder):
    encoder = Encoder(models("qwen3"), 32)
    empty = folder.read([folder.llava("a", "")] * 2, "empty.json")
    with pytest.raises(BadSample):
        check_training_rows(loader([empty], encoder))
    message = refusal(check_training_rows, loader([empty], encoder, on_bad="skip"))
    assert "empty.json: none of its 2 rows can be used. Row" in message and "seq_length" not in message
    both = folder.read([folder.llava("a", ""), folder.llava("word " * 50, "a")], "both.json")
    message = refusal(check_training_rows, loader([both], encoder, on_bad="skip"))
    assert "1 dropped" in message and "1 skipped" in message and "Set train.seq_length" in message


def test_missing_files_are_found_before_training(models, folder):
    """Reading finds them in rows that are not encoded; the nearest name is suggested."""
    rows = [folder.llava("<image>what?", "this", image=folder.image("red.png")) for _ in range(12)]
    rows[10]["image"] = "rad.png"
    source = folder.read(rows, "missing.json")
    message = refusal(check_training_rows, loader([source], Encoder(models("qwen3_vl"), 512)))
    assert (
        "row 10 (id r): image 'rad.png' is missing" in message
        and "did you mean 'red.png'? Else check the row" in message
    )
    assert refusal(check_held_out_rows, EvalSet([source], Encoder(models("qwen3_vl"), 512), 1)) == message
    check_held_out_rows(EvalSet([source], Encoder(models("qwen3_vl"), 512), 1, max_rows=10))
    check_training_rows(loader([source], Encoder(models("qwen3_vl"), 512), on_bad="skip"))
