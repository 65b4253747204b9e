"""The sample store: resuming by sample, files that do not show interruptions, foreign answers."""

import fcntl
import gzip
import json
import os

import pytest

from replayssm.study.samples import (
    Sample,
    SampleStore,
    question_digest,
    read_samples,
    sequence_number,
)

IDENTITY = {"model": {"weights": "abc"}, "policy": {"ring_len": 16}, "seed": 0, "task": "gsm8k"}


def sample(question="q1", number=0, answer="#### 1", **changes):
    values = {
        "question": question,
        "sample": number,
        "prompt_tokens": 10,
        "new_tokens": 5,
        "reasoning_tokens": 0,
        "finish": "stop",
        "reasoning_ended": True,
        "loop": False,
        "reasoning": "",
        "raw_answer": answer,
        "answer": answer,
        "filters": {},
    }
    return Sample(**values | changes)


def store(tmp_path, **changes):
    return SampleStore(tmp_path, IDENTITY | changes, name="gsm8k fp16-sr+nvfp4@16")


SAMPLES = [sample("q2", 1), sample("q1", 0, "line\u2028end\r\n"), sample("q2", 0), sample("q3", 0)]


def test_samples_come_back_sorted(tmp_path):
    with store(tmp_path) as opened:
        for one in SAMPLES:
            opened.add(one)
        assert ("q1", 0) in opened and ("q1", 1) not in opened and len(opened) == 4
        opened.finish()
    identity, read = read_samples(opened.path)
    assert identity["seed"] == 0
    assert [(s.question, s.sample) for s in read] == [("q1", 0), ("q2", 0), ("q2", 1), ("q3", 0)]
    assert read[0] == SAMPLES[1]
    assert opened.path.name.startswith("gsm8k-fp16-sr-nvfp4-16-")


@pytest.mark.parametrize("cut", range(0, 400, 7))
def test_killed_anywhere_and_continued_gives_the_same_bytes(tmp_path, cut):
    with store(tmp_path / "whole") as opened:
        for one in SAMPLES:
            opened.add(one)
        opened.finish()
    with store(tmp_path / "cut") as killed:
        for one in reversed(SAMPLES):
            killed.add(one)
    os.truncate(killed.path, min(cut, killed.path.stat().st_size))
    with store(tmp_path / "cut") as resumed:
        for one in SAMPLES:
            if (one.question, one.sample) not in resumed:
                resumed.add(one)
        resumed.finish()
    assert resumed.path.read_bytes() == opened.path.read_bytes()


def test_more_samples_can_be_added_to_a_finished_file(tmp_path):
    for batch in (SAMPLES[:2], SAMPLES[2:]):
        with store(tmp_path) as opened:
            for one in batch:
                opened.add(one)
            opened.finish()
    assert len(read_samples(opened.path)[1]) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"weights": "abd"}},
        {"policy": {"ring_len": 32}},
        {"seed": 1},
        {"task": "other"},
    ],
)
def test_two_identities_in_one_folder_never_meet(tmp_path, changes):
    with store(tmp_path) as mine:
        mine.add(sample())
    with store(tmp_path, **changes) as theirs:
        assert len(theirs) == 0 and theirs.path != mine.path


def test_a_foreign_file_is_refused_by_name(tmp_path):
    with store(tmp_path, policy={"ring_len": 32}, seed=3) as foreign:
        foreign.add(sample())
    mine = store(tmp_path)
    foreign.path.rename(mine.path)
    with pytest.raises(ValueError, match=r"another run: policy\.ring_len, seed differ"):
        with mine:
            pass


def test_damaged_and_missing_files(tmp_path):
    with store(tmp_path) as opened:
        opened.add(sample())
    lines = opened.path.read_text().splitlines()
    opened.path.write_text("\n".join([lines[0], '{"question": 1', lines[1]]) + "\n")
    with pytest.raises(ValueError, match="line 2: damaged"):
        with store(tmp_path):
            pass
    opened.path.write_text("\n".join([lines[0], json.dumps({"question": 1})]) + "\n")
    with pytest.raises(ValueError, match="line 2: this is not a sample"):
        read_samples(opened.path)
    opened.path.write_text("hello\n")
    with pytest.raises(ValueError, match="line 1: this is not a file of samples"):
        read_samples(opened.path)
    with pytest.raises(ValueError, match="missing"):
        read_samples(tmp_path / "no.jsonl")


def test_packed_files_are_read_and_continued(tmp_path):
    with store(tmp_path) as opened:
        for each in SAMPLES[:3]:
            opened.add(each)
        opened.finish()
    packed = opened.path.with_name(opened.path.name + ".gz")
    packed.write_bytes(gzip.compress(opened.path.read_bytes()))
    as_it_was = read_samples(opened.path)
    opened.path.unlink()
    assert read_samples(opened.path) == as_it_was
    with store(tmp_path) as opened:
        assert len(opened) == 3
        opened.add(SAMPLES[3])
        opened.finish()
    assert len(read_samples(opened.path)[1]) == 4  # the packed file is not looked at any more
    opened.path.unlink()
    packed.write_bytes(packed.read_bytes()[:-9])
    for _ in range(2):  # an attempt leaves nothing that would be taken for samples
        with pytest.raises(ValueError, match="jsonl.gz: "):
            with store(tmp_path):
                pass
        with pytest.raises(ValueError, match="jsonl.gz: "):
            read_samples(opened.path)


def test_no_other_process_gets_in_while_a_file_is_unpacked(tmp_path, monkeypatch):
    with store(tmp_path) as opened:
        opened.add(SAMPLES[0])
        opened.finish()
    packed = opened.path.with_name(opened.path.name + ".gz")
    packed.write_bytes(gzip.compress(opened.path.read_bytes()))
    opened.path.unlink()
    refused = []

    def meanwhile(before):
        """`before`, with another process that comes in between."""

        def call(*args):
            with pytest.raises(ValueError, match="in use by another process"):
                with store(tmp_path):
                    pass
            refused.append(before.__name__)
            return before(*args)

        return call

    for module, name in ((gzip, "decompress"), (os, "replace")):
        monkeypatch.setattr(module, name, meanwhile(getattr(module, name)))
    with store(tmp_path) as mine:
        assert refused == ["decompress", "replace"]
        with pytest.raises(ValueError, match="in use by another process"):
            with store(tmp_path):
                pass
        mine.add(SAMPLES[1])
    assert len(read_samples(mine.path)[1]) == 2


def test_a_file_replaced_before_it_is_locked_is_opened_again(tmp_path, monkeypatch):
    with store(tmp_path) as first:
        for one in SAMPLES[:2]:
            first.add(one)
    lock = fcntl.flock

    def finished_meanwhile(*args):
        monkeypatch.setattr(fcntl, "flock", lock)
        with store(tmp_path) as other:
            other.finish()
        lock(*args)

    monkeypatch.setattr(fcntl, "flock", finished_meanwhile)
    with store(tmp_path) as late:
        late.add(SAMPLES[2])
    assert len(read_samples(late.path)[1]) == 3


def test_a_file_in_use(tmp_path):
    with store(tmp_path):
        with pytest.raises(ValueError, match="in use by another process"):
            with store(tmp_path):
                pass
    with store(tmp_path):
        pass


def test_names_of_questions_and_samples_are_pure():
    assert question_digest("gsm8k", "1 + 1?") == question_digest("gsm8k", "1 + 1?")
    assert question_digest("gsm8k", "1 + 1?") != question_digest("gpqa", "1 + 1?")
    numbers = {sequence_number("q", k) for k in range(64)} | {sequence_number("p", 0)}
    assert len(numbers) == 65 and all(0 <= n < 1 << 32 for n in numbers)
