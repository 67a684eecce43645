"""The demo's data set: real text, four kinds of files, the same bytes every time."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
import zstandard
from tokenizers import Tokenizer

from training.demo import corpus, data
from training.demo.errors import CorpusError

SIZE = data.MixtureSize(steps=40, seq_len=512, packs=16, lanes=4, switch_step=20)


@pytest.fixture(scope="module")
def built(library: Path, tmp_path_factory: pytest.TempPathFactory) -> data.DataFacts:
    return data.build(tmp_path_factory.mktemp("built"), SIZE, library=library)


def test_building_twice_gives_the_same_bytes(library: Path, built: data.DataFacts, tmp_path: Path) -> None:
    def digests(directory: Path) -> dict[str, str]:
        files = [path for path in directory.rglob("*") if path.is_file()]
        return {
            path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
        }

    stages: list[None] = []
    data.build(tmp_path, SIZE, library=library, on_stage=lambda: stages.append(None))
    assert len(stages) == data.NUM_STAGES
    assert digests(tmp_path) == digests(built.mixture.parent)
    assert len(digests(tmp_path)) == 9


def test_modules_come_in_order_without_tests_and_unreadable_files(library: Path) -> None:
    paths = [module.path for module in corpus.standard_library(library)]
    assert paths == sorted(paths, key=str.encode)
    assert {"json/decoder.py", "optparse.py"} <= set(paths)
    assert not {"test/test_left_out.py", "latin.py", "broken.py"} & set(paths)


def test_every_source_is_read_back_in_its_own_format(built: data.DataFacts) -> None:
    root = built.mixture.parent
    documents = {source.name: source.documents for source in built.sources}
    code = [pq.read_table(root / f"code/part-{index:05d}.parquet") for index in range(4)]
    assert sum(table.num_rows for table in code) == documents["code"] > 0
    long = pq.read_table(root / "long.parquet")["text"].to_pylist()
    assert len(long) == documents["long"] > 0
    assert all(len(text) >= 40_000 for text in long)
    with zstandard.open(root / "prose.jsonl.zst", "rt", encoding="utf-8") as lines:
        prose = [json.loads(line) for line in lines]
    assert len(prose) == documents["prose"] > 0
    assert all(row["text"] for row in prose)
    chat = [json.loads(line) for line in (root / "chat.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(chat) == documents["chat"] > 0
    questions = [row["messages"][0]["content"].split()[0] for row in chat]
    assert set(questions) == {"What", "Write"}
    assert {tuple(message["role"] for message in row["messages"]) for row in chat} == {("user", "assistant")}


def test_dialogues_answer_with_docstring_and_source_in_turn(library: Path) -> None:
    first, second, *_ = corpus.dialogues(corpus.standard_library(library))
    assert first.question.startswith("What does `bisect.")
    assert second.question.startswith("Write the Python function `")
    assert second.answer.startswith("def ")


def test_tokenizer_gives_any_text_back(built: data.DataFacts) -> None:
    tokenizer = Tokenizer.from_file(str(built.mixture.parent / "tokenizer.json"))
    text = "def f(x):\n\treturn 'naïve 数'  # \x00\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert [tokenizer.token_to_id(token) for token in data.SPECIAL_TOKENS] == [0, 1, 2]
    assert tokenizer.encode(data.END_OF_TEXT).ids == [0]


def test_mixture_names_what_was_built(built: data.DataFacts) -> None:
    mixture = yaml.safe_load(built.mixture.read_text(encoding="utf-8"))
    assert (mixture["seq_len"], mixture["packs"], mixture["lanes"]) == (512, 16, 4)
    assert list(mixture["sources"]) == [source.name for source in built.sources]
    for source in mixture["sources"].values():
        assert list(built.mixture.parent.glob(source["path"]))
    assert [stage["step"] for stage in mixture["schedule"]] == [0, 20]
    for weights in (
        {k: v["weight"] for k, v in mixture["sources"].items()},
        mixture["schedule"][1]["weights"],
    ):
        assert sum(weights.values()) == pytest.approx(1.0)


def test_a_python_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no Python sources"):
        corpus.standard_library(tmp_path)
