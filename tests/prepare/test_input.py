"""What is read, and what happens with what cannot be read."""

import bz2
import gzip
import json
import lzma
import os

import pytest

from titan_like.config.errors import ConfigError
from titan_like.prepare.config import Clean, Input
from titan_like.prepare.read import Reader, Unit, plan_tasks
from titan_like.prepare.report import Ledger
from titan_like.prepare.storage import find_files


def dropped(report, stage="read and clean"):
    return {reason: entry["documents"] for reason, entry in report[stage]["dropped"].items()}


def test_r017_records_without_text_are_skipped_and_counted(shop):
    path = shop.jsonl("a.jsonl", "", "a", "   ", {"text": None}, {})
    report = shop.run(path)
    assert shop.texts() == ["a"]
    assert dropped(report) == {"empty": 2, "no text": 2}
    names = [e["document"] for entry in report["read and clean"]["dropped"].values() for e in entry["examples"]]
    assert sorted(names) == [f"{path}:{line}" for line in (1, 3, 4, 5)]
    with pytest.raises(ConfigError, match=rf"{path}:1: empty; give it a text"):
        shop.run(path, out="strict", input__empty="error")
    assert not (shop.folder / "strict").exists()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_r026_invalid_utf8(shop, name):
    lines = [b"ok", b"\xff\xfe bad", b"ok too"]
    if name == "a.jsonl":
        lines = [b'{"text": "' + line + b'"}' for line in lines]
    path = shop.file(name, b"\n".join(lines))
    with pytest.raises(ConfigError, match=rf"{path}:2: invalid UTF-8: byte (0|10): b'\\xff"):
        shop.run(path, input__text_unit="line")
    report = shop.run(path, out="skip", input__text_unit="line", input__bad_input="skip")
    assert shop.texts(out="skip") == ["ok", "ok too"]
    assert dropped(report) == {"invalid UTF-8": 1}
    report = shop.run(path, out="replace", input__text_unit="line", input__bad_input="replace")
    assert shop.texts(out="replace") == ["ok", "\ufffd\ufffd bad", "ok too"]
    assert report["read and clean"]["repaired"] == {"invalid UTF-8 replaced": 1}


def test_r027_a_byte_order_mark_changes_nothing(shop):
    plain = shop.jsonl("plain.jsonl", "one", "two", "three")
    content = open(plain, "rb").read()  # noqa: SIM115
    for out, source in (("a", plain), ("b", shop.file("bom.jsonl", b"\xef\xbb\xbf" + content))):
        shop.run(source, out=out)
    for suffix in ("bin", "idx"):
        assert (shop.folder / f"a/train.{suffix}").read_bytes() == (shop.folder / f"b/train.{suffix}").read_bytes()
    assert shop.texts(out="b") == ["one", "two", "three"]


def test_marks_line_ends_and_nul(shop):
    report = shop.run(shop.jsonl("a.jsonl", "x\r\ny\rz", "\ufeffa\ufeffb", "n\0ul", "\0"))
    assert shop.texts() == ["x\ny\nz", "a\ufeffb", "nul"]  # only at the start is it a byte order mark
    assert report["read and clean"]["repaired"] == {"characters normalised": 3}
    assert dropped(report) == {"empty": 1}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "not JSON"),
        (b"[1]", "no JSON object"),
        (b'{"text": 7}', "text is no text"),
        (b'{"text": "a\\ud800"}', "lone surrogate"),
    ],
)
def test_a_bad_line_stops_with_its_place_or_is_counted(shop, line, reason):
    path = shop.jsonl("a.jsonl", "first", line, "last")
    with pytest.raises(ConfigError, match=rf"{path}:2: {reason}.*bad_input"):
        shop.run(path)
    assert dropped(shop.run(path, input__bad_input="skip")) == {reason: 1}
    assert shop.texts() == ["first", "last"]


def test_a_lone_surrogate_can_be_replaced(shop):
    shop.run(shop.jsonl("a.jsonl", b'{"text": "a\\ud800b \\ud83d\\ude00"}'), input__bad_input="replace")
    assert shop.texts() == ["a\ufffdb \N{GRINNING FACE}"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz", "a.jsonl.bz2", "a.jsonl.zst"])
def test_compressed_and_truncated_files(shop, name):
    lines = (json.dumps({"text": f"{i} {os.urandom(40).hex()}"}) + "\n" for i in range(4000))
    content = "".join(lines).encode()
    if name.endswith("zst"):
        packed = pytest.importorskip("zstandard").ZstdCompressor().compress(content)
    else:
        compress = {"gz": gzip.compress, "xz": lzma.compress, "bz2": lambda data: bz2.compress(data, 1)}
        packed = compress[name.rpartition(".")[2]](content)
    path = shop.folder / name
    path.write_bytes(packed)
    shop.run(str(path), out="whole")
    assert [text.split()[0] for text in shop.texts(out="whole")] == [str(i) for i in range(4000)]
    path.write_bytes(packed[: len(packed) * 2 // 3])
    with pytest.raises(ConfigError, match=rf"{path}: damaged file"):
        shop.run(str(path))
    report = shop.run(str(path), input__bad_input="skip")
    assert dropped(report)["damaged file"] == 1
    found = [text.split()[0] for text in shop.texts()]
    assert found == [str(i) for i in range(len(found))] and len(found) < 4000


def test_parquet(shop):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"body": ["a", None, "b"], "n": [1, 2, 3]}), shop.folder / "a.parquet")
    report = shop.run(str(shop.folder / "a.parquet"), input__text_key="body")
    assert shop.texts() == ["a", "b"] and dropped(report) == {"no text": 1}
    with pytest.raises(ConfigError, match=r"no column text but body, n; set input\.text_key"):
        shop.run(str(shop.folder / "a.parquet"), out="other")


def test_text_files_are_documents(shop):
    paths = [shop.file(f"in/{i}.txt", f"text {i}\nend\n".encode()) for i in range(3)]
    shop.file("in/left.bin", b"x")
    report = shop.run(str(shop.folder / "in"))
    assert shop.texts() == [f"text {i}\nend\n" for i in range(3)]
    assert report["read and clean"]["documents_in"] == 3
    assert find_files([str(shop.folder / "in"), paths[0]], [".txt"]) == paths


def test_a_file_of_lines_is_cut_into_ranges_that_meet(tmp_path):
    lines = [f'{{"text": "{"x" * (i % 7)}{i}"}}' for i in range(200)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    for task_bytes in (1, 7, 64, 1000, 10**6):
        tasks = plan_tasks([str(path)], Input(), task_bytes)
        assert len(tasks) == -(-path.stat().st_size // task_bytes)
        reader = Reader(tasks, Input(), Clean(), Ledger(None))
        texts = [document.text for rank in range(len(tasks)) for document in reader(None, rank)]
        assert texts == [json.loads(line)["text"] for line in lines]


def test_the_line_of_an_error_in_the_middle_of_a_file_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc"}\n' * 50 + "oops\n" + '{"text": "abc"}\n')
    reader = Reader([[Unit(str(path), 400, 900)]], Input(), Clean(), Ledger(None))
    with pytest.raises(ConfigError, match=rf"{path}:51: not JSON"):
        list(reader())


@pytest.mark.parametrize("name", ["corpus@2024", "in@7/x.txt", "a.txt@0"])
def test_an_at_sign_in_a_name_is_no_place(shop, name):
    path = shop.file(name, b"\xff")
    with pytest.raises(ConfigError, match=rf"^{path}: invalid UTF-8: byte 0"):
        shop.run(path)
    path = shop.file(name, b"ok\n" * 50 + b"\xff\n")  # lines, read in ranges
    with pytest.raises(ConfigError, match=rf"^{path}:51: invalid UTF-8"):
        shop.run(path, input__text_unit="line", executor__task_bytes=40)


def test_when_no_record_has_the_field_it_is_asked_for(shop):
    path = shop.jsonl("a.jsonl", {"content": "a"}, {"content": "b"})
    with pytest.raises(ConfigError, match=r"no document is left.*set input\.text_key.*\(it is 'text'\).*dropped 2"):
        shop.run(path)
    with pytest.raises(ConfigError) as caught:
        shop.run(shop.jsonl("b.jsonl", {"content": "a"}, ""))  # one has it
    assert "text_key" not in str(caught.value)


def test_small_files_share_a_task(tmp_path):
    paths = []
    for i in range(10):
        paths.append(str(tmp_path / f"{i}.txt"))
        (tmp_path / f"{i}.txt").write_text("x" * 10)
    tasks = plan_tasks(paths, Input(), 25)
    assert [[unit.path for unit in task] for task in tasks] == [paths[0:3], paths[3:6], paths[6:9], paths[9:]]


def test_the_standard_library_without_tests_and_packages():
    found = find_files(["stdlib"], [".py"])
    names = {os.path.basename(path) for path in found}
    assert {"argparse.py", "textwrap.py"} <= names and len(found) > 300
    parts = {part for path in found for part in path.split("/")[-3:-1]}
    assert not parts & {"test", "tests", "site-packages", "ensurepip"}


def test_missing_sources(tmp_path, shop):
    with pytest.raises(ConfigError, match="absent: no such file"):
        shop.run(str(tmp_path / "absent"))
    (tmp_path / "in").mkdir()
    with pytest.raises(ConfigError, match=r"in: no such file, or no \.jsonl"):
        shop.run(str(tmp_path / "in"))
    with pytest.raises(ConfigError, match=r"no document is left.*give other files.*dropped 1 \(empty\)"):
        shop.run(shop.jsonl("a.jsonl", " "))
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == ["a.jsonl", "in"]


def test_remote_paths_go_through_blobfile(shop, monkeypatch):
    pytest.importorskip("blobfile")
    import blobfile

    from titan_like.prepare import storage

    path = shop.jsonl("a.jsonl", "x")
    monkeypatch.setattr(storage, "_is_remote", lambda path: True)  # blobfile takes local paths too
    assert find_files([str(shop.folder)], [])[0].endswith("a.jsonl")
    assert storage.size_of(path) == blobfile.stat(path).size
    with storage.open_bytes(path) as file:
        assert file.read() == b'{"text": "x"}\n'


def test_what_blobfile_refuses_is_one_sentence(monkeypatch):
    blobfile = pytest.importorskip("blobfile")

    def refuse(path):
        raise blobfile.Error("no access")

    monkeypatch.setattr(blobfile, "isdir", refuse)
    with pytest.raises(ConfigError, match=r"^source gs://b/x cannot be read: no access; check"):
        find_files(["gs://b/x"], [])
    with pytest.raises(ConfigError, match="the input has foo://x, which cannot be read"):  # not through a config
        find_files(["foo://x"], [])


def test_a_missing_package_is_named(monkeypatch):
    from titan_like.prepare import storage

    with pytest.raises(ConfigError, match=r"x\.zst needs the package nosuch.*pip install nosuch"):
        storage.need("nosuch.part", "x.zst")
