"""Compare resampled sounds with the results of transformers and of another filter.

    python benchmarks/resampling.py [--out FILE.json]

Sounds of three seconds, with 40 tones of random pitch and some noise, 1, 2 and 6 channels, at common rates, are
resampled to 16 kHz by `octavo.data.encoding.audio.load` and by transformers' `load_audio(backend="soundfile")`; the
largest difference of samples is reported. SciPy's `resample_poly` shows the effect of a different filter: the root mean
square of the difference over that of the sound, and the mean difference of the features of a Whisper tower over their
range.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from scipy.signal import resample_poly
from transformers import WhisperFeatureExtractor
from transformers.audio_utils import load_audio

from octavo.bench import record
from octavo.data.encoding.audio import Limits, load

RATE, SECONDS = 16_000, 3.0
RATES, CHANNELS = (8_000, 11_025, 22_050, 24_000, 44_100, 48_000, 96_000), (1, 2, 6)


def sound(rate: int, channels: int) -> np.ndarray:
    """Samples [T, channels] of tones up to 0.45 of the rate."""
    rng, t = np.random.default_rng(rate + channels), np.arange(int(rate * SECONDS)) / rate
    pitches = rng.uniform(80, 0.45 * rate, (channels, 40))
    tones = [sum(np.sin(2 * np.pi * one * t + one) for one in notes) for notes in pitches]
    return 0.01 * (np.stack(tones, axis=1) + rng.normal(size=(len(t), channels)))


def compared(file: Path, rate: int, channels: int, features: Any) -> dict[str, float]:
    samples = sound(rate, channels)
    soundfile.write(file, samples, rate, subtype="FLOAT")
    ours, stock = load(file, Limits(RATE, 1, 30 * RATE)), load_audio(str(file), RATE, backend="soundfile")
    common = math.gcd(rate, RATE)
    other = resample_poly(samples.mean(axis=1), RATE // common, rate // common).astype(np.float32)[: len(ours)]
    seen, else_seen = features(ours), features(other)
    return {
        "rate": rate, "channels": channels, "samples": len(ours), "stock_samples": len(stock),
        "stock_largest": float(np.abs(ours - stock).max()) if len(ours) == len(stock) else math.inf,
        "scipy_rms": float(np.sqrt(((ours - other) ** 2).mean() / (ours**2).mean())),
        "scipy_features": float(np.abs(seen - else_seen).mean() / np.ptp(seen)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    extractor = WhisperFeatureExtractor(feature_size=128)

    def features(samples: np.ndarray) -> np.ndarray:
        values = extractor(samples, sampling_rate=RATE, return_tensors="np")["input_features"][0]
        return values[:, : len(samples) // extractor.hop_length]

    with tempfile.TemporaryDirectory() as place:
        rows = [compared(Path(place) / "x.wav", rate, n, features) for rate in RATES for n in CHANNELS]
    print("rate    channels  largest difference to transformers   SciPy: rms   features")
    for row in rows:
        print("{rate:6}  {channels:8}  {stock_largest:34g}   {scipy_rms:10.3f}   {scipy_features:8.4f}".format(**row))
    if args.out is not None:
        about = {"command": "python benchmarks/resampling.py", "machine": record.describe_machine()}
        print(f"wrote {record.save({**about, 'rows': rows}, args.out)}")


if __name__ == "__main__":
    main()
