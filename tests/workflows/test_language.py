"""Text: tokenizers in `map`, collators of transformers, models of several kinds."""

from __future__ import annotations

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from tiny import gpt2, llama, sentences, tokenizer
from tokenizers import normalizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    T5Config,
    T5ForConditionalGeneration,
)

from dataload import fit, make_dataset, make_loader, mix

ROWS = 48
tokens = tokenizer()
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}


def tokenize(batch):
    return {"input_ids": tokens(batch["text"]).input_ids, "label": batch["label"]}


@pytest.fixture
def texts(write, cache):
    return make_dataset(write({"text": sentences(ROWS), "label": np.arange(ROWS) % 2}), cache=cache)


@pytest.fixture
def rows(texts):
    return texts.map(tokenize)


def losses_of(model, loader, epochs=3, **options):
    """Train on the batches of a collator of transformers. Return the loss of each epoch."""

    def loss(model, batch):
        return model(**batch).loss

    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return [record["loss"] for record in fit(model, optimizer, loader, loss, epochs=epochs, progress=False, **options)]


def test_tokenize_in_map_and_train(rows):
    """`map` tokenizes once; a transform pads; the loss falls; another program reads the same tokens."""

    def pad(batch):
        ids = torch.nn.utils.rnn.pad_sequence(batch["input_ids"], batch_first=True)
        return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}

    losses = losses_of(gpt2(), make_loader(rows, 8, transform=pad))
    assert losses[-1] < losses[0]


def test_another_vocabulary_gives_no_old_row(texts):
    """A tokenizer that changed is another `map`: its rows are made again, without a `version=`."""

    def mapped(made):
        return texts.map(lambda batch: {"ids": made(batch["text"]).input_ids}).__getitems__(range(ROWS))

    before = mapped(tokenizer())
    words = tokenizer()
    words.backend_tokenizer.normalizer = normalizers.Replace("cat", "dog")
    after = mapped(words)
    changed = [first["ids"] != second["ids"] for first, second in zip(before, after, strict=True)]
    assert changed == ["cat" in text.split() for text in sentences(ROWS)]


def test_sequence_classification(rows):
    """DataCollatorWithPadding as it is, in threads, and in workers."""
    for options in ({}, {"num_workers": 1}):
        loader = make_loader(rows, 8, collate_fn=DataCollatorWithPadding(tokens), **options)
        losses = losses_of(BertForSequenceClassification(BertConfig(**SMALL)), loader, epochs=1)
        assert len(losses) == 1
    batch = next(iter(loader))
    assert {*batch} == {"input_ids", "attention_mask", "labels"}


def test_masked_language_model(rows):
    """DataCollatorForLanguageModeling masks other tokens in each epoch, and the same in each run."""
    plain = rows.map(lambda batch: {"input_ids": [each.tolist() for each in batch["input_ids"]]})
    loader = make_loader(plain, 8, collate_fn=DataCollatorForLanguageModeling(tokens, mlm_probability=0.3))
    first, second = ([batch["input_ids"].tolist() for batch in loader] for _ in range(2))
    again = make_loader(plain, 8, collate_fn=DataCollatorForLanguageModeling(tokens, mlm_probability=0.3))
    assert [batch["input_ids"].tolist() for batch in again] == first != second
    losses = losses_of(BertForMaskedLM(BertConfig(**SMALL)), loader)
    assert losses[-1] < losses[0]


def test_causal_language_model(rows):
    """DataCollatorForLanguageModeling without masks; accumulated batches are weighed by their labels."""
    plain = rows.map(lambda batch: {"input_ids": [each.tolist() for each in batch["input_ids"]]})
    loader = make_loader(plain, 8, collate_fn=DataCollatorForLanguageModeling(tokens, mlm=False))
    losses = losses_of(gpt2(), loader, accumulate=2, loss_weight="tokens")
    assert losses[-1] < losses[0]


def test_seq2seq(rows):
    """DataCollatorForSeq2Seq pads inputs and labels, for an encoder and a decoder."""

    def answers(batch):
        return {"input_ids": batch["input_ids"], "labels": [ids.flip(0) for ids in batch["input_ids"]]}

    config = T5Config(vocab_size=64, d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    loader = make_loader(rows.map(answers), 8, collate_fn=DataCollatorForSeq2Seq(tokens, model=model))
    losses = losses_of(model, loader)
    assert losses[-1] < losses[0]


def test_token_classification(rows):
    """DataCollatorForTokenClassification pads a label for each token."""

    def tagged(batch):
        return {"input_ids": batch["input_ids"], "labels": [ids % 3 for ids in batch["input_ids"]]}

    collator = DataCollatorForTokenClassification(tokens)
    losses = losses_of(
        BertForTokenClassification(BertConfig(**SMALL, num_labels=3)),
        make_loader(rows.map(tagged), 8, collate_fn=collator),
    )
    assert losses[-1] < losses[0]


def test_multiple_choice(texts):
    """DataCollatorForMultipleChoice: several answers of a row, each with tokens of its own."""

    def choices(batch):
        ids = [[ids, ids[::-1]] for ids in tokens(batch["text"]).input_ids]
        return {
            "input_ids": ids,
            "attention_mask": [[[1] * len(each) for each in pair] for pair in ids],
            "label": batch["label"],
        }

    batch = next(iter(make_loader(texts.map(choices), 8, collate_fn=DataCollatorForMultipleChoice(tokens))))
    assert batch["input_ids"].shape[:2] == (8, 2)


def test_packing_by_a_collator(rows):
    """DataCollatorWithFlattening joins the documents of a batch; the positions begin again in each."""
    plain = rows.map(lambda batch: {"input_ids": [each.tolist() for each in batch["input_ids"]]})
    loader = make_loader(plain, 8, shuffle=False, collate_fn=DataCollatorWithFlattening())
    batch = next(iter(loader))
    lengths = [len(row["input_ids"]) for row in plain.__getitems__(range(8))]
    assert batch["input_ids"].shape == (1, sum(lengths))
    assert (batch["position_ids"] == 0).sum() == 8


def test_packing_with_boundaries(rows):
    """DataCollatorWithFlattening with the arguments of flash attention."""
    plain = rows.map(lambda batch: {"input_ids": [each.tolist() for each in batch["input_ids"]]})
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = next(iter(make_loader(plain, 8, shuffle=False, collate_fn=collator)))
    lengths = [len(row["input_ids"]) for row in plain.__getitems__(range(8))]
    assert batch["cu_seq_lens_q"].tolist() == [0, *np.cumsum(lengths).tolist()]


def test_packed_documents_do_not_see_each_other(rows):
    """`pack`: by `position_ids`, and with `use_cache=False`, each document has the logits that it has alone; fit."""
    packed, model = rows.pack(32, "input_ids", split=False), llama().eval()
    with torch.no_grad():
        for batch in make_loader(packed, 4):
            ids, segments = batch["input_ids"].long(), batch["segment_ids"]
            logits = model(input_ids=ids, position_ids=batch["position_ids"].long(), use_cache=False).logits
            for row, own in enumerate(segments):
                for number in range(1, int(own.max()) + 1):
                    alone = model(input_ids=ids[row, own == number][None]).logits[0]
                    torch.testing.assert_close(logits[row, own == number], alone)

    def loss(model, batch):
        ids, positions = batch["input_ids"].long(), batch["position_ids"].long()
        labels = ids.masked_fill(positions == 0, -100)
        return model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False).loss

    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = [each["loss"] for each in fit(model, optimizer, make_loader(packed, 4), loss, epochs=3, progress=False)]
    assert losses[-1] < losses[0]


def test_tokens_of_one_length(write):
    """uint16 shards of one length, as nanoGPT has them, straight to the model."""
    ids = np.random.default_rng(0).integers(5, 60, 40 * 17).astype(np.uint16)
    path = write({"tokens": pa.FixedSizeListArray.from_arrays(pa.array(ids), 17)})

    def shifted(batch):
        ids = batch["tokens"].long()
        return {"input_ids": ids, "labels": ids}

    losses = losses_of(gpt2(), make_loader(path, 8, transform=shifted))
    assert losses[-1] < losses[0]


def test_tokenize_in_the_collator(texts):
    """A collator that tokenizes the texts of the rows itself."""

    def collate(rows):
        batch = tokens([row["text"] for row in rows], padding=True, return_tensors="pt")
        return {**batch, "labels": torch.stack([row["label"] for row in rows])}

    losses = losses_of(BertForSequenceClassification(BertConfig(**SMALL)), make_loader(texts, 8, collate_fn=collate))
    assert len(losses) == 3


def test_pairs_with_negatives_of_the_batch(write, cache):
    """Two texts of each row, embedded apart: a contrastive loss over the batch."""
    texts = make_dataset(write({"query": sentences(ROWS), "passage": sentences(2 * ROWS)[ROWS:]}), cache=cache)
    rows = texts.map(lambda batch: {name: tokens(batch[name]).input_ids for name in ("query", "passage")})
    embed = torch.nn.EmbeddingBag(64, 8)

    def loss(model, batch):
        query, passage = (model(batch[name].values, batch[name].offsets[:-1]) for name in ("query", "passage"))
        return torch.nn.functional.cross_entropy(query @ passage.T, torch.arange(len(query)))

    loader = make_loader(rows, 8, ragged="flat", drop_last=True)
    history = fit(embed, torch.optim.Adam(embed.parameters(), 0.05), loader, loss, epochs=3, progress=False)
    assert history[-1]["loss"] < history[0]["loss"]


def test_documents_become_chunks(texts):
    """`flat_map`: a document becomes as many chunks of tokens as it has, and an empty one none."""

    def chunks(batch):
        ids = [tokens(text).input_ids for text in batch["text"]]
        return {"input_ids": [part[start : start + 4] for part in ids for start in range(0, len(part), 4)]}

    rows = texts.flat_map(chunks)
    expected = sum(-(-len(tokens(text).input_ids) // 4) for text in sentences(ROWS))
    assert len(rows) == expected == sum(len(batch["input_ids"]) for batch in make_loader(rows, 8))


def test_overflowing_tokens(texts):
    """`flat_map` with a tokenizer that returns overflowing tokens."""

    def windows(batch):
        made = tokens(batch["text"], truncation=True, max_length=5, stride=2, return_overflowing_tokens=True)
        return {"input_ids": made["input_ids"], "label": batch["label"][made["overflow_to_sample_mapping"]]}

    rows = texts.flat_map(windows)
    assert len(rows) > ROWS
    assert max(len(row["input_ids"]) for row in rows.__getitems__(range(len(rows)))) == 5


def test_map_keeps_messages(write, cache):
    """`{**batch, "n": …}` keeps a nested column of messages as it is."""
    messages = [[{"role": "user", "content": text}] for text in sentences(ROWS)]
    rows = make_dataset(write({"messages": messages}), cache=cache)
    mapped = rows.map(lambda batch: {**batch, "turns": [len(each) for each in batch["messages"]]})
    assert mapped[5]["messages"] == messages[5]
    assert sum(int(batch["turns"].sum()) for batch in make_loader(mapped, 8)) == ROWS


def test_files_of_save_to_disk(tmp_path):
    """A folder that `Dataset.save_to_disk` wrote, with a label of names."""
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    made = datasets.Dataset.from_dict({"text": sentences(ROWS), "label": [0, 1] * (ROWS // 2)}, features=features)
    made.save_to_disk(tmp_path / "saved")
    rows = make_dataset(tmp_path / "saved")
    assert sorted(text for batch in make_loader(rows, 8) for text in batch["text"]) == sorted(sentences(ROWS))
    assert rows.class_names("label") == ["no", "yes"]


def test_a_dataset_of_hugging_face(tmp_path):
    """`make_loader` of a `datasets.Dataset`: its Arrow files are read."""
    datasets.Dataset.from_dict({"text": sentences(ROWS)}).save_to_disk(tmp_path / "saved")
    loader = make_loader(datasets.load_from_disk(tmp_path / "saved"), 8)
    assert sorted(text for batch in loader for text in batch["text"]) == sorted(sentences(ROWS))


def test_sources_by_weight(write, cache):
    """Two corpora by weight: every prefix holds each one's share."""
    corpora = {
        name: make_dataset(write({"input_ids": [[number] * 4 for _ in range(60)]}, name), cache=cache)
        for number, name in enumerate(("web", "books"))
    }
    loader = make_loader(mix(corpora, {"web": 3, "books": 1}), 8)
    shares = [sum(int(ids[0]) for ids in batch["input_ids"]) for batch in loader]
    assert set(shares[:-1]) == {2}


def test_invalid_text(tmp_path, cache):
    """A row of invalid UTF-8 ends no job with `errors="replace"`."""
    import pyarrow.parquet as pq

    broken = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 2, 5], np.int32)), pa.py_buffer(b"ok\xffab"))
    pq.write_table(pa.table({"text": broken}), tmp_path / "x.parquet")
    rows = make_dataset(tmp_path / "x.parquet", cache=cache, errors="replace")
    assert [row["text"] for row in rows.__getitems__([0, 1])] == ["ok", "\ufffdab"]
