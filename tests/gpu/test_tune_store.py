"""The tuning file: merging, two processes at once, and files that are not what they should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu import tune_store
from gpu.tune_store import Entry, from_text, merge, read, save, to_text

IDENTITY = {"name": "a device", "backend": "wgpu", "checked": False}
ENTRY = Entry("matmul", "f32 m64", "0123456789ab", "tile 64x64", "tile 32x32", 1.25, 1_700_000_000.0)

names = st.text(st.characters(exclude_categories=("C", "Z")), max_size=20)
entries = st.builds(
    Entry,
    family=st.sampled_from(["matmul", "attention"]),
    shape_class=st.sampled_from(["a", "b", "c"]),
    code=st.sampled_from(["1", "2"]),
    winner=names,
    default=names,
    ratio=st.floats(0.01, 100),
    stamp=st.floats(1, 1e9),
)
tables = st.lists(entries, max_size=12).map(lambda found: merge(*({e.key: e} for e in found)))


@settings(deadline=None)
@given(tables, tables, tables)
def test_merging_is_a_union_in_any_order_and_grouping(a, b, c):
    assert merge(a, b) == merge(b, a)
    assert merge(merge(a, b), c) == merge(a, merge(b, c))
    assert merge(a, a) == a
    both = merge(a, b)
    assert both.keys() == a.keys() | b.keys()
    for key, entry in both.items():
        assert entry.key == key
        assert entry.stamp == max(t[key].stamp for t in (a, b) if key in t)


@settings(deadline=None)
@given(tables, tables, tables)
def test_so_it_is_where_the_oldest_go(a, b, c):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_store, "MAX_ENTRIES", 3)
        a, b, c = merge(a), merge(b), merge(c)
        assert merge(merge(a, b), c) == merge(a, merge(b, c)) == merge(c, b, a)
        assert len(merge(a, b)) == min(3, len(a.keys() | b.keys()))


@settings(deadline=None)
@given(tables)
def test_a_table_survives_the_file(table):
    text = to_text(IDENTITY, table)
    assert from_text(text, IDENTITY) == table
    assert to_text(IDENTITY, from_text(text, IDENTITY)) == text


@settings(deadline=None)
@given(
    st.text() | st.recursive(st.none() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
)
def test_any_other_text_is_a_value_error(value):
    text = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(ValueError):
        from_text(text, IDENTITY)


def file_of(**changes):
    data = json.loads(to_text(IDENTITY, {ENTRY.key: ENTRY}))
    data["entries"][0].update(changes)
    return json.dumps(data)


@pytest.mark.parametrize(
    "text, words",
    [
        ("[" * 100_000, "nested too deep"),
        ("{}", "not of format 1"),
        (file_of().replace('"format": 1', '"format": 2'), "not of format 1"),
        (file_of().replace("a device", "another"), "of another device"),
        (file_of(more=1), "does not have the fields family, shape_class, code, winner"),
        (file_of(winner=3), "an entry's winner is '3'"),
        (file_of(winner="\x1b[2J"), "an entry's winner is"),
        (file_of(winner="\ud800"), "an entry's winner is"),
        (file_of(winner="x" * 501), "an entry's winner is 'xxx"),
        (file_of(ratio=float("nan")), "an entry's ratio is 'nan'"),
        (file_of(ratio=0), "an entry's ratio is '0'"),
        (file_of(ratio=True), "an entry's ratio is 'True'"),
        (file_of(stamp=1e300), "an entry's stamp is '1e"),
        (file_of(stamp="now"), "an entry's stamp is 'now'"),
        (file_of(ratio=10**400), "an entry's ratio is '1000"),
        ('{"format": 1, "device": ' + json.dumps(IDENTITY) + ', "entries": {}}', "not a list of at most 4000"),
        ('{"format": 1, "device": ' + json.dumps(IDENTITY) + ', "entries": [' + "0," * 4000 + "0]}", "at most 4000"),
    ],
)
def test_what_is_wrong_with_a_file(text, words, tmp_path, caplog):
    with pytest.raises(ValueError, match=words):
        from_text(text, IDENTITY)
    path = tmp_path / "tune.json"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    assert read(path, IDENTITY) == {}
    assert f"the tuning file {path} is ignored" in caplog.text
    assert save(path, IDENTITY, {ENTRY.key: ENTRY}) == {ENTRY.key: ENTRY} == read(path, IDENTITY)


def test_what_is_no_file(tmp_path, caplog):
    (tmp_path / "folder").mkdir()
    assert read(tmp_path / "nothing", IDENTITY) == {} and not caplog.records
    assert read(tmp_path / "folder", IDENTITY) == {} and "it is not a file" in caplog.text
    big = tmp_path / "big"
    with open(big, "wb") as file:
        file.truncate(tune_store.MAX_BYTES + 1)
    assert read(big, IDENTITY) == {} and "its size is 8,388,609 bytes" in caplog.text
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert read(tmp_path / "pipe", IDENTITY) == {}


def test_devices_have_files_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("ANYGPU_CACHE", str(tmp_path))
    ours = tune_store.path_of(IDENTITY)
    assert ours.parent == tmp_path / "tune"
    assert ours.name.startswith("a-device-wgpu-") and ours.name.endswith(".v1.json")
    others = [tune_store.path_of({**IDENTITY, name: "x"}) for name in (*IDENTITY, "driver")]
    assert len({ours, *others}) == 1 + len(others)
    assert len(tune_store.path_of({"name": "../" * 300 + "é"}).name) < 100


def test_older_news_do_not_replace_newer(tmp_path):
    path = tmp_path / "tune.json"
    newer = replace(ENTRY, winner="tile 16x16", stamp=ENTRY.stamp + 1)
    save(path, IDENTITY, {newer.key: newer})
    assert save(path, IDENTITY, {ENTRY.key: ENTRY}) == {newer.key: newer}


WRITER = """
import sys
from pathlib import Path
from gpu.tune_store import Entry, save
path, who, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
sys.stdin.readline()
for i in range(count):
    entry = Entry("matmul", f"{who} {i}", "c", "a", "b", 1.5, 1.0 + i)
    save(path, {"name": "x"}, {entry.key: entry})
"""


def test_two_processes_at_once_lose_nothing(tmp_path):
    path, count = tmp_path / "tune" / "both.json", 60
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), who, str(count)], stdin=subprocess.PIPE)
        for who in "ab"
    ]
    for writer in writers:
        writer.stdin.write(b"\n")
        writer.stdin.close()
    assert [writer.wait(120) for writer in writers] == [0, 0]
    found = {key[1] for key in read(path, {"name": "x"})}
    assert found == {f"{who} {i}" for who in "ab" for i in range(count)}
    assert sorted(p.name for p in path.parent.iterdir()) == ["both.json", "both.lock"]


def test_a_lock_that_is_never_given_back_is_waited_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(tune_store, "LOCK_SECONDS", 0.05)
    path = tmp_path / "tune.json"
    with tune_store._locked(path.with_suffix(".lock")):
        assert save(path, IDENTITY, {ENTRY.key: ENTRY}) == {ENTRY.key: ENTRY} == read(path, IDENTITY)
