"""Data: conversations in the usual formats, encoded by the model's own processor, in a reproducible order.

    read -> Source of Conversation -> Encoder -> Sample -> collate -> Loader / EvalSet
                                                        -> collate_pack -> PackLoader

`train_loader` and `eval_set` build these from a configuration. Prompts and preferences use the same Source and Loader
with other functions to parse, encode and collate a row.
"""

from octavo.data.batching.collate import collate, collate_pack
from octavo.data.encoding.encode import Encoder
from octavo.data.encoding.sample import IGNORE, Sample
from octavo.data.errors import BadSample, DataError, LongSample
from octavo.data.loaders.eval_set import EvalSet
from octavo.data.loaders.from_config import eval_set, pair_loader, pair_set, prompt_loader, train_loader
from octavo.data.loaders.loader import Loader
from octavo.data.loaders.pack_loader import PackLoader
from octavo.data.loaders.rows_from_config import (
    count_epoch_rows,
    decode_videos,
    preference_rows,
    prepare_datasets,
    training_rows,
)
from octavo.data.order import Mixture
from octavo.data.rows.audio_refs import AudioRef
from octavo.data.rows.conversations import Conversation, ImageRef, Text, Turn, parse
from octavo.data.skip_report import SkipReport
from octavo.data.tasks.documents import Document, DocumentEncoder
from octavo.data.tasks.pairs import LabelledEncoder, Pair, PairEncoder
from octavo.data.tasks.prompts import PromptEncoder, PromptSample
from octavo.data.tasks.sources import Source, read

__all__ = [
    "IGNORE", "AudioRef", "BadSample", "Conversation", "DataError", "Document", "DocumentEncoder", "Encoder",
    "EvalSet", "ImageRef", "LabelledEncoder", "Loader", "LongSample", "Mixture", "PackLoader", "Pair", "PairEncoder",
    "PromptEncoder", "PromptSample", "Sample", "SkipReport", "Source", "Text", "Turn", "collate", "collate_pack",
    "count_epoch_rows", "decode_videos", "eval_set", "pair_loader", "pair_set", "parse", "preference_rows",
    "prepare_datasets", "prompt_loader", "read", "train_loader", "training_rows",
]  # fmt: skip
