"""Audio: waveforms of varying length, torchaudio, feature extractors."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
import torchaudio

from dataload import fit, make_dataset, make_loader

ROWS, RATE = 24, 8000


@pytest.fixture
def waves(write, cache):
    draw = np.random.default_rng(0)
    lengths = [800 + 40 * (row % 5) for row in range(ROWS)]
    waves = [draw.normal(size=length).astype(np.float32) for length in lengths]
    return make_dataset(write({"wave": waves, "label": np.arange(ROWS) % 3}), cache=cache)


mel = torchaudio.transforms.MelSpectrogram(RATE, n_fft=128, n_mels=16)


def spectrograms(batch):
    padded = torch.nn.utils.rnn.pad_sequence(batch["wave"], batch_first=True)
    return {"mel": mel(padded).log1p(), "label": batch["label"]}


def test_spectrograms(waves):
    """Waveforms of varying length, padded and transformed by torchaudio in a transform."""
    model = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d((16, 4)), torch.nn.Flatten(), torch.nn.Linear(64, 3))

    def loss(model, batch):
        return torch.nn.functional.cross_entropy(model(batch["mel"]), batch["label"])

    loader = make_loader(waves, 8, transform=spectrograms)
    history = fit(model, torch.optim.Adam(model.parameters(), 0.05), loader, loss, epochs=5, progress=False)
    assert history[-1]["loss"] < history[0]["loss"]


def test_features_once(waves):
    """`map` resamples and averages once; each epoch reads the features."""
    resample = torchaudio.transforms.Resample(RATE, RATE // 2)

    def features(batch):
        return {
            "feature": torch.stack([mel(resample(wave)).mean(1) for wave in batch["wave"]]),
            "label": batch["label"],
        }

    rows = waves.map(features)
    assert next(iter(make_loader(rows, 8)))["feature"].shape == (8, 16)


masked = torch.nn.Sequential(torchaudio.transforms.FrequencyMasking(8), torchaudio.transforms.TimeMasking(4))


def augmented(batch):
    return {"mel": masked(spectrograms(batch)["mel"])}


def test_masks_are_reproducible(waves):
    """SpecAugment of torchaudio draws from torch: the same batches in threads, the loop and workers."""
    found = [
        [batch["mel"] for batch in make_loader(waves, 8, transform=augmented, **options)]
        for options in ({}, {"num_threads": 0}, {"num_workers": 2})
    ]
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_feature_extractor_of_transformers(waves):
    """A feature extractor of transformers as the collator, and a Wav2Vec2 model."""
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2ForSequenceClassification

    extractor = Wav2Vec2FeatureExtractor(sampling_rate=RATE)

    def collate(rows):
        made = extractor([row["wave"].numpy() for row in rows], sampling_rate=RATE, padding=True, return_tensors="pt")
        return {"input_values": made.input_values, "labels": torch.stack([row["label"] for row in rows])}

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    layers = {"conv_dim": (8, 8), "conv_kernel": (10, 4), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_labels": 3}
    model = Wav2Vec2ForSequenceClassification(Wav2Vec2Config(**small, **layers, **positions))
    batch = next(iter(make_loader(waves, 8, collate_fn=collate)))
    assert model(**batch).logits.shape == (8, 3)


def test_stereo_from_map(waves):
    """`map` returns stereo: two lists of numbers of a length of their own for each row."""
    rows = waves.map(lambda batch: {"stereo": [torch.stack([wave, -wave]) for wave in batch["wave"]]})
    assert np.asarray(rows[3]["stereo"]).shape == (2, 920)


def test_audio_of_hugging_face(tmp_path, cache):
    """The bytes of an `Audio` column of Hugging Face: a struct of bytes and path."""
    import io
    import wave

    import pyarrow.parquet as pq

    sink = io.BytesIO()
    with wave.open(sink, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(np.arange(100, dtype=np.int16).tobytes())
    column = pa.array([{"bytes": sink.getvalue(), "path": "a.wav"}] * 4)
    pq.write_table(pa.table({"audio": column}), tmp_path / "x.parquet")
    rows = make_dataset(tmp_path / "x.parquet", cache=cache)

    def decode(batch):
        found = []
        for data in batch["audio.bytes"]:
            with wave.open(io.BytesIO(data)) as file:
                found.append(np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32))
        return {"wave": found}

    assert next(iter(make_loader(rows.map(decode), 2)))["wave"][0].tolist() == list(range(100))
