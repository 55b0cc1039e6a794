"""Faults of rows that hold several samples."""

from faults.fault import area

area(
    "packing",
    (
        "packs-are-one-sample", "models/attention/segments.py",
        "for a, b in pairwise(edges) if a", "for a, b in [(0, edges[-1])] if a",
        "samples of a pack see each other",
        "models/test_packed.py",
    ),
    (
        "packs-first-grid", "models/forward/packed.py",
        "grid[first_image : first_image + count]", "grid[:count]",
        "every sample of a pack has the positions of the first image",
        "models/test_packed.py",
    ),
    (
        "packs-layers-uncounted", "models/forward/packed.py",
        "if len(running.seen) != self.layers:", "if False:",
        "a model whose layers are not told where samples begin trains on",
        "models/test_packed.py",
    ),
    (
        "packs-learn-first-tokens", "data/batching/collate.py",
        "labels[0, ends[:-1]] = IGNORE", "labels[0, :1] = IGNORE",
        "the last token of a sample learns to predict the first one of the next",
        "data/test_packing.py",
    ),
    (
        "packs-resume-one-early", "data/loaders/pack_loader.py",
        "(window, index + 1, checksum) if index + 1 < len(packs)",
        "(window, index, checksum) if index + 1 < len(packs)",
        "a resumed run repeats a pack",
        "data/test_packing.py",
    ),
    (
        "packs-of-two-epochs", "data/loaders/token_counts.py",
        "min(first + self.size, (turn + 1) * self.mixture.round)", "first + self.size",
        "the last window of an epoch has rows of the next, which come again",
        "data/test_packing.py",
    ),
    (
        "packs-dealt-in-turn", "data/batching/packing.py",
        "loads[rank] += costs[number]", "loads[rank] += 1",
        "what packs cost does not decide who trains them",
        "data/test_packing.py",
    ),
    (
        "packs-fullest-last", "data/batching/packing.py",
        "bisect_left(free_space, (length, -1))",
        "len(free_space) - 1 if free_space and free_space[-1][0] >= length else len(free_space)",
        "packs are filled by the worst fit",
        "data/test_packing.py",
    ),
    (
        "packs-documents-without-end", "data/loaders/token_counts.py",
        "len(ids) + added + end_token", "len(ids) + added",
        "the end token of documents is not counted",
        "data/test_packing.py",
    ),
    (
        "packs-images-on-their-side", "data/rows/image_refs.py",
        "(height, width) if exif.get(ORIENTATION) in (5, 6, 7, 8) else (width, height)", "(width, height)",
        "images that lie on their side are counted as stored",
        "data/test_packing.py",
    ),
    (
        "packs-balance-padding", "train/forward/forward.py",
        "if not boundaries.samples:", "if True:",
        "routers are balanced over padding too",
        "train/test_packing.py",
    ),
    (
        "packs-other-plans", "train/step/step.py",
        "if float(checksums) != packing_checksum * self.world.size:", "if False:",
        "ranks that planned other packs train on",
        "train/test_packing.py",
    ),
    (
        "context-counts-rows-twice", "train/step/step.py",
        "is_first_context_rank = self.world.context_rank == 0", "is_first_context_rank = True",
        "rows that ranks share count once for each",
        "train/test_context.py",
    ),
    (
        "context-balances-its-own-tokens", "train/forward/balance.py",
        "context.sum(chosen).float()", "chosen.float()",
        "routers are balanced over each rank's tokens alone",
        "parallel/test_context_models.py",
    ),
    (
        "context-features-by-rank", "parallel/images.py",
        "encoders.argsort(stable=True).argsort()", "encoders.argsort(stable=True)",
        "features of images lie at the placeholders of others",
        "parallel/test_context_models.py",
    ),
    (
        "context-sees-from-the-left", "models/attention/attention.py",
        "seen.tril(k.shape[2] - q.shape[2])", "seen.tril()",
        "queries whose sample began on another rank see its beginning alone",
        "parallel/test_context_models.py",
    ),
    (
        "context-labels-cut-with-tokens", "train/step/step.py",
        "(target != losses.IGNORE).any(dim=0)[part]", "(target != losses.IGNORE).any(dim=0)[part][:-1]",
        "the last token of each rank predicts nothing",
        "train/test_context.py",
    ),
    (
        "context-heads-repeated-apart", "parallel/context.py",
        "x.repeat_interleave(heads // x.shape[1], 1)", "x.repeat(1, heads // x.shape[1], 1, 1)",
        "heads of queries meet the keys of others",
        "parallel/test_context.py -m long",
    ),
)  # fmt: skip
