"""Faults of LLaVA-OneVision-1.5, most of them met by somebody."""

from faults.fault import area

TESTS = "models/test_onevision.py"
area(
    "onevision",
    (
        "onevision-published-offsets", "models/custom/onevision/segments.py",
        "torch.cat([segment[1:] for segment in x.split(self.rows)])",
        "torch.cat([x[sum(self.patches[:i]) + 1 :][:n] for i, n in enumerate(self.patches)])",
        "class tokens of earlier images are not counted where they are taken out",
        TESTS,
    ),
    (
        "onevision-places-in-rows", "models/custom/onevision/segments.py",
        ".transpose(1, 2).reshape(-1, 2)", ".reshape(-1, 2)",
        "patches, which come in blocks, are turned as if they came row by row",
        TESTS,
    ),
    (
        "onevision-class-token-unturned", "models/custom/onevision/tower.py",
        "self.class_pos_emb.float())", "0 * self.class_pos_emb.float())",
        "class tokens have no angles",
        TESTS,
    ),
    (
        "onevision-gelu-by-tanh", "models/custom/onevision/tower.py",
        "nn.GELU()", 'nn.GELU("tanh")',
        "the projector's activation is an approximation",
        TESTS,
    ),
    (
        "onevision-angles-unmade", "models/custom/onevision/tower.py",
        "init.copy_(module.inv_freq, module.frequencies())", "pass",
        "angles of a model that was built without memory are whatever the memory held",
        TESTS,
    ),
    (
        "onevision-two-frames", "models/processors/stock.py",
        "temporal_patch_size = 1", "temporal_patch_size = 2",
        "a folder that does not say how many frames a patch has gives patches of two",
        TESTS,
    ),
    (
        "onevision-registered-over-others", "models/custom/register.py",
        "is family.config", "is not None",
        "another package's class counts as Octavo's own, and its code in the folder is not refused",
        TESTS,
    ),
)  # fmt: skip
