"""Objects of libraries count by their state, and a version adds to the source of a function."""

from __future__ import annotations

import functools
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dataload import ConfigError, make_dataset
from dataload.mapping.identity import identity

VERSIONS = [None, "1"]


def use(batch: Any, thing: Any) -> Any:
    return {**batch, "thing": thing}


def identity_of(thing: Any, version: str | None) -> str:
    return identity(functools.partial(use, thing=thing), version)


def tokenizer(word: str) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[UNK]": 0, "[PAD]": 1, word: 2, "text": 3}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


def fast(word: str) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(word), unk_token="[UNK]", pad_token="[PAD]")


def slow(word: str) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.ByT5Tokenizer(additional_special_tokens=[word], extra_ids=0)


class Model(torch.nn.Module):
    def __init__(self, factor: str) -> None:
        super().__init__()
        self.factor = factor
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        torch.nn.init.constant_(self.layers[0].weight, 0.5)
        torch.nn.init.constant_(self.layers[0].bias, 0.5)


def weights(word: str) -> Any:
    made = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    torch.nn.init.constant_(made.weight, len(word))
    torch.nn.init.constant_(made.bias, 0)
    return made


def buffer(word: str) -> Any:
    made = Model("same")
    made.layers[1].running_mean.fill_(len(word))
    return made


def settings_of_a_module(word: str) -> Any:
    made = Model("same")
    made.table = OrderedDict([(word, 0), ("text", 1)])
    return made


def helpers_of_a_tokenizer(word: str) -> Any:
    transformers = pytest.importorskip("transformers")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("[PAD]\n[UNK]\n[SEP]\n[X_SEP]\n[CLS]\n[MASK]\n")
        file.flush()
        made = transformers.ProphetNetTokenizer(vocab_file=file.name)
    made.basic_tokenizer.never_split.add(word)
    return made


def hooked(word: str) -> Any:
    made = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(made.weight)
    torch.nn.init.zeros_(made.bias)
    for text in ("hello", "goodbye"):
        made.register_forward_hook(hook, with_kwargs=text == word)
    return made


def hook(*given: Any) -> None: ...


def of_pydantic(word: str) -> Any:
    pydantic = pytest.importorskip("pydantic")

    class Options(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        word: str

    return Options(word=word)


def of_attrs(word: str) -> Any:
    return pytest.importorskip("attrs").validators.in_([word])


KNOWN = [tokenizer, fast, slow, helpers_of_a_tokenizer, Model, weights, buffer, settings_of_a_module, hooked]
KNOWN += [of_pydantic, of_attrs, torch.device]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("make", KNOWN)
def test_objects_of_libraries_count_by_their_state(make: Callable[[str], Any], version: str | None) -> None:
    one, other = ("cpu", "meta") if make is torch.device else ("hello", "goodbye")
    assert identity_of(make(one), version) == identity_of(make(one), version)
    if make is not torch.device or version is None:
        assert identity_of(make(one), version) != identity_of(make(other), version)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_call_of_a_tokenizer_sets_does_not_count(version: str | None) -> None:
    made = fast("hello")
    before = identity_of(made, version)
    made(["hello", "hello text"], padding=True, truncation=True, max_length=1)
    assert identity_of(made, version) == before
    made.add_tokens(["more"])
    assert identity_of(made, version) != before


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"x": np.arange(40, dtype=np.float32)}), tmp_path / "x.parquet", row_group_size=10)
    return tmp_path / "x.parquet"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_changed_vocabulary_gives_new_rows_and_the_same_one_no_second_pass(
    rows: Path, tmp_path: Path, version: str | None
) -> None:
    calls = tmp_path / "calls"

    def tokenize(batch: Any, tokens: Any) -> Any:
        with calls.open("a") as file:
            file.write("x")
        return {"id": np.full(len(batch["x"]), tokens.encode("hello").ids[0])}

    def mapped(word: str) -> list[int]:
        dataset = make_dataset(rows, cache_dir=tmp_path / "cache", cache_bytes="100MB")
        found = dataset.map(functools.partial(tokenize, tokens=tokenizer(word)), version=version)
        return [found[number]["id"] for number in range(len(found))]

    assert mapped("hello") == [2] * 40
    passed = calls.read_text()
    assert mapped("hello") == [2] * 40
    assert calls.read_text() == passed
    assert mapped("goodbye") == [0] * 40


def test_weights_that_change_after_map_are_an_error(rows: Path) -> None:
    model = torch.nn.Linear(1, 1)

    def apply(batch: Any) -> Any:
        return {"y": model(batch["x"][:, None]).detach()[:, 0].numpy()}

    dataset = make_dataset(rows, cache=False).map(apply)
    assert dataset[0]["y"] == pytest.approx(model.bias.item())
    torch.nn.init.constant_(model.bias, 7)
    with pytest.raises(ConfigError, match="has changed since map"):
        dataset[11]


def test_a_tensor_that_changes_behind_the_back_of_autograd_is_an_error(rows: Path) -> None:
    array = np.ones(3, np.float32)
    parameter, of_array, large = torch.ones(3), torch.from_numpy(array), torch.ones(1 << 20)

    def apply(batch: Any) -> Any:
        return {"y": batch["x"] * parameter[0] * of_array[0] * large[0]}

    def change_parameter() -> None:
        parameter.data.mul_(5)

    def change_array() -> None:
        array[1] = 7

    for change in (change_parameter, change_array, lambda: large.data.mul_(5)):
        dataset = make_dataset(rows, cache=False).map(apply)
        assert dataset[0]["y"] == 0
        change()
        with pytest.raises(ConfigError, match="has changed since map"):
            dataset[11]


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_vocabulary_that_changes_after_map_is_an_error(rows: Path, is_fast: bool) -> None:
    made = fast("hello") if is_fast else tokenizer("hello")
    backend = made.backend_tokenizer if is_fast else made

    def tokenize(batch: Any) -> Any:
        return {"id": np.full(len(batch["x"]), backend.encode("hello").ids[0]), "name": [str(made)] * len(batch["x"])}

    dataset = make_dataset(rows, cache=False).map(tokenize)
    assert dataset[0]["id"] == 2
    backend.model = tokenizer("goodbye").model
    with pytest.raises(ConfigError, match="has changed since map"):
        dataset[11]


EDITS = {
    "the function": ("def f(b): return {'x': b['x'] + $}", "f"),
    "a function that it calls": ("def g(b): return $\ndef f(b): return g(b)", "f"),
    "a constant": ("C = $\ndef f(b): return C", "f"),
    "code without a source": ("names = {}\nexec('def f(b): return lambda: {$}', names)\nf = names['f']", "f"),
    "a class that a call makes": ("F = type('F', (), {'__call__': lambda self, b: $})\nf = F()", "f"),
    "a method": ("class F:\n    def __call__(self, b): return $\nf = F()", "f"),
    "a function beside an object of any state": (
        "import threading\nLOCK = threading.Lock()\ndef g(): return $\ndef f(b):\n    with LOCK: return g()",
        "f",
    ),
}


@pytest.mark.parametrize("text", [text for text, _ in EDITS.values()], ids=[*EDITS])
def test_an_edit_counts_with_a_version(tmp_path: Path, text: str) -> None:
    found = {identity(made(tmp_path, text.replace("$", value)), "1") for value in "121"}
    assert len(found) == 2
    assert identity(made(tmp_path, text.replace("$", "1")), "2") not in found


LOADED = {
    "a global": "M = None\ndef f(b):\n    global M\n    M = M or [b]\n    return M",
    "an entry": "M = {}\ndef f(b):\n    M['model'] = b\n    return M",
    "an item": "M = []\ndef f(b):\n    M.append(b)\n    return M",
    "an attribute": "class F:\n    m = None\n    def __call__(self, b): self.m = b\nf = F()",
    "a variable around it": (
        "def make():\n    m = None\n    def f(b):\n        nonlocal m\n        m = b\n    return f\nf = make()"
    ),
    "an attribute of a class": "class F:\n    m = None\n    def __call__(self, b): F.m = b\nf = F()",
    "an attribute of a function": "def f(b):\n    f.m = b",
    "an attribute of a helper": (
        "class H:\n    def __init__(self): self.m = None\n    def load(self, b): self.m = self.m or b\n"
        "H = H()\ndef f(b): H.load(b)"
    ),
}


@pytest.mark.parametrize("text", LOADED.values(), ids=[*LOADED])
def test_what_a_function_loads_at_its_first_call_does_not_count_with_a_version(tmp_path: Path, text: str) -> None:
    function = made(tmp_path, text)
    before = identity(function, "1")
    function({"x": 1})
    assert identity(function, "1") == before


def test_what_is_filled_before_the_call_counts_with_a_version(tmp_path: Path) -> None:
    """Neither a method that the call does not name, nor what that one calls, runs in the call."""
    text = (
        "def add(words, to): to.vocab[words] = len(to.vocab)\nclass F:\n    def __init__(self): self.vocab = {}\n"
        "    def fit(self, words):\n        for word in words:\n            self.vocab[word] = len(self.vocab)\n"
        "            add(word * 2, self)\n"
        "    def __call__(self, b): return self.encode(b)\n    def encode(self, b): return self.vocab[b]\nf = F()"
    )
    found = []
    for words in ("ab", "ba", "ab"):
        function = made(tmp_path, text)
        function.fit(words)
        found.append(identity(function, "1"))
    assert found[0] == found[2] != found[1]


def test_ranks_that_use_other_devices_share_rows_with_a_version() -> None:
    assert identity_of("cuda:0", "1") == identity_of("cuda:3", "1") == identity_of(torch.device("cuda", 1), "1")
    assert identity_of("cuda:0", None) != identity_of("cuda:3", None)


def test_an_object_of_any_state_counts_by_its_type_with_a_version() -> None:
    assert identity_of(threading.Lock(), "1") == identity_of(threading.Lock(), "1")
    assert identity_of(threading.Lock(), "1") != identity_of(threading.Event(), "1")


def made(folder: Path, text: str) -> Any:
    """Return `f` of a module of its own, as another process imports it."""
    path = folder / f"{abs(hash(text))}" / "project.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    scope: dict[str, Any] = {"__name__": "project"}
    exec(compile(text, str(path), "exec"), scope)
    return scope["f"]
