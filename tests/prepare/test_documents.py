import math

import numpy as np
import pytest

from titan_like.config.errors import ConfigError
from titan_like.prepare.documents import Document, Tally, deduplicate, find_files, read, split, summary
from titan_like.prepare.shards import entropy_nats


def files(folder, **contents):
    paths = []
    for name, content in contents.items():
        paths.append(folder / f"{name}.txt")
        paths[-1].write_bytes(content)
    return paths


def texts(paths, tally=None):
    return [document.text for document in read(paths, tally or Tally())]


def test_r017_empty_documents_are_skipped_and_counted(tmp_path):
    tally = Tally()
    assert texts(files(tmp_path, a=b"", b=b"a", c=b"   \n\t", d=b"\xef\xbb\xbf"), tally) == ["a"]
    assert tally.documents_in == 4 and tally.bytes_in == 0 + 1 + 5 + 3
    assert tally.dropped == {"empty": [str(tmp_path / f"{name}.txt") for name in "acd"]}


def test_r026_invalid_utf8_is_skipped_counted_and_named(tmp_path):
    tally = Tally()
    paths = files(tmp_path, a=b"ok", b=b"\xff\xfe bad", c=b"ok too", d=b"nul\0", e=b"\xed\xa0\x80")
    assert texts(paths, tally) == ["ok", "ok too"]
    assert tally.dropped == {"invalid UTF-8": [str(paths[1]), str(paths[4])], "NUL character": [str(paths[3])]}
    assert summary(tally)[0] == f"dropped 2 (invalid UTF-8): {paths[1]}, {paths[4]}"


def test_r027_mark_and_line_ends_change_nothing(tmp_path):
    plain, *others = texts(
        files(tmp_path, a=b"x\ny\n", b=b"\xef\xbb\xbfx\ny\n", c=b"x\r\ny\r\n", d=b"x\ry\r", e=b"x\n\xef\xbb\xbfy")
    )
    assert others == [plain, plain, plain, "x\n\ufeffy"]  # only at the start is it a byte order mark


def test_exact_duplicates_keep_the_first():
    tally = Tally()
    documents = [Document("1", "cat"), Document("2", "dog"), Document("3", "cat"), Document("4", "cat ")]
    assert [d.name for d in deduplicate(documents, tally)] == ["1", "2", "4"]
    assert tally.dropped == {"duplicate": ["3"]}


def test_split_depends_on_the_text_alone():
    documents = [Document(str(i), f"text {i}") for i in range(2000)]
    train, validation = split(documents, 0.1)
    assert len(train) + len(validation) == 2000
    assert 150 < len(validation) < 250  # 200 +- 3.7 standard deviations
    moved = {d.text for d in split([Document("elsewhere", d.text) for d in reversed(documents[:1000])], 0.1)[1]}
    assert moved == {d.text for d in validation if int(d.name) < 1000}
    assert split(documents, 0)[1] == []


def test_find_files(tmp_path):
    (tmp_path / "sub" / "tests").mkdir(parents=True)
    for name in ("b.py", "a.md", "no.bin", "sub/tests/c.txt"):
        (tmp_path / name).write_text("x")
    found = find_files([str(tmp_path), str(tmp_path / "b.py"), str(tmp_path / "no.bin")])
    assert [str(p.relative_to(tmp_path)) for p in found] == ["a.md", "b.py", "sub/tests/c.txt", "no.bin"]
    with pytest.raises(ConfigError, match="absent: no such file"):
        find_files([str(tmp_path / "absent")])


def test_the_standard_library_without_tests_and_packages():
    found = find_files(["stdlib"])
    names = {path.name for path in found}
    assert {"argparse.py", "textwrap.py"} <= names and len(found) > 300
    assert "topics.py" not in names and not any(name.startswith("test_") and "site-packages" in name for name in names)
    parts = {part for path in found for part in path.parts[-3:-1]}
    assert not parts & {"test", "tests", "site-packages", "ensurepip"}


def test_entropy():
    assert entropy_nats(np.array([1, 1, 0, 2])) == pytest.approx(1.5 * math.log(2))  # 2 * 1/4 ln 4 + 1/2 ln 2
    assert entropy_nats(np.array([0, 7])) == 0
