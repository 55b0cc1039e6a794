"""Faults of what a mesh is said to cost."""

from faults.fault import area

area(
    "cost",
    (
        "cost-gathers-once", "train/estimate/step_time/wire.py",
        "gathers = 1 + group.regathered", "gathers = 1",
        "weights that backward gathers again are not counted",
        "train/step_time/test_formulas.py",
    ),
    (
        "cost-no-block-ahead", "train/estimate/step_time/groups.py",
        "return frozenset(reached_blocks + prefetched)", "return frozenset(reached_blocks)",
        "the frozen block that FSDP2 fetches for nothing is not counted",
        "train/step_time/test_counted.py",
    ),
    (
        "cost-gradients-of-keys-in-16-bits", "train/estimate/step_time/wire.py",
        "(gathering_ranks - 1) * shard * 4,", "(gathering_ranks - 1) * shard * 2,",
        "gradients of gathered keys are summed in fp32 and told in half of it",
        "train/step_time/test_formulas.py",
    ),
    (
        "cost-own-rows-sent", "parallel/wire.py",
        "row * (sum(splits) - splits[rank])", "row * sum(splits)",
        "rows that stay on their rank count as sent",
        "parallel/test_wire.py",
    ),
    (
        "cost-experts-all-gathered", "train/estimate/memory/states.py",
        "shape=(-(-p.shape[0] // expert_ranks), *p.shape[1:])", "shape=p.shape",
        "ranks that share experts are told to gather all of them",
        "train/memory/test_footprint.py",
    ),
    (
        "cost-what-does-not-fit-is-best", "train/estimate/step_time/search.py",
        "return candidate.excess > 0, not is_close,", "return False, not is_close,",
        "the best mesh does not fit the card",
        "train/step_time/test_formulas.py",
    ),
)  # fmt: skip
