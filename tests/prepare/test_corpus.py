import os
import signal
import subprocess
import sys
import time

import pytest

from titan_like.config.errors import ConfigError
from titan_like.data.dataset import check_data
from titan_like.data.indexed import IndexedDataset
from titan_like.data.manifest import Manifest, file_sha256
from titan_like.data.tokenizer import Tokenizer
from titan_like.prepare import corpus
from titan_like.prepare.corpus import ensure_default, prepare_corpus
from titan_like.prepare.main import main

VOCAB = 300


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.py").write_text(f"def f{i}(x):\n    return x * {i}\n" * 5)
    (folder / "copy.py").write_bytes((folder / "00.py").read_bytes())
    (folder / "empty.py").write_text("\n")
    return str(folder)


def prepare(output, source, say=lambda line: None, **settings):
    prepare_corpus(output, [source], **({"vocab_size": VOCAB, "validation_fraction": 0.2} | settings), say=say)


def test_what_is_written(tmp_path, source):
    lines: list[str] = []
    out = tmp_path / "new" / "out"
    prepare(out, source, lines.append)
    assert sorted(p.name for p in out.iterdir()) == sorted(
        ["tokenizer.model", *(f"{n}.{s}" for n in ("train", "validation") for s in ("bin", "idx", "manifest.json"))]
    )
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    tokenizer = Tokenizer(out / "tokenizer.model")
    decoded = []
    for name in ("train", "validation"):
        data, manifest = IndexedDataset(out / name), Manifest.load(out / name)
        documents = [data.read(i).tolist() for i in range(data.num_sequences)]
        assert all(ids[-1] == tokenizer.eos_id and tokenizer.eos_id not in ids[:-1] for ids in documents)
        decoded += [tokenizer.decode(ids[:-1]) for ids in documents]
        assert (manifest.documents, manifest.tokens) == (len(documents), sum(map(len, documents)))
        assert (manifest.vocab_size, manifest.eod_id, manifest.dtype) == (VOCAB, 2, "uint16")
        assert manifest.tokenizer_sha256 == tokenizer.sha256 == file_sha256(manifest.tokenizer_path(out / name))
        assert manifest.bin_sha256 == file_sha256(out / f"{name}.bin")
    assert sorted(decoded) == sorted(f"def f{i}(x):\n    return x * {i}\n" * 5 for i in range(40))
    report = "\n".join(lines)
    assert "read 42 documents" in report and "kept 40 documents" in report
    assert "dropped 1 (duplicate)" in report and "dropped 1 (empty)" in report
    assert check_data([str(out / "train")], 8, VOCAB, out / "tokenizer.model") == []


def test_the_result_is_reproducible_and_r027_free_of_marks(tmp_path, source):
    prepare(tmp_path / "a", source)
    for path in (tmp_path / "source").iterdir():
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    prepare(tmp_path / "b", source)
    for name in ("train.bin", "train.idx", "validation.bin", "tokenizer.model"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_what_is_there_and_valid_is_left_alone(tmp_path, source):
    prepare(tmp_path / "out", source)
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    lines: list[str] = []
    prepare(tmp_path / "out", source, lines.append)
    assert "there and valid" in lines[0] and len(lines) == 1
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()} == before


def test_other_settings_are_refused_not_ignored(tmp_path, source):
    prepare(tmp_path / "out", source)
    with pytest.raises(ConfigError, match=r"'vocab_size': 300.*'vocab_size': 301.*remove it"):
        prepare(tmp_path / "out", source, vocab_size=301)


@pytest.mark.parametrize("damage", ["cut", "remove", "tokenizer"])
def test_a_damaged_output_is_never_overwritten(tmp_path, source, damage):
    out = tmp_path / "out"
    prepare(out, source)
    name = {"cut": "train.bin", "remove": "validation.idx", "tokenizer": "tokenizer.model"}[damage]
    content = (out / name).read_bytes()[:-1]
    (out / name).unlink() if damage == "remove" else (out / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name}.*remove it or choose another output"):
        prepare(out, source)
    assert (out / name).exists() == (damage != "remove")


def test_foreign_files_are_never_overwritten(tmp_path, source):
    (tmp_path / "out").mkdir()
    prepare(tmp_path / "out", source)  # an empty folder is free
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("mine", "file"):
        with pytest.raises(ConfigError, match=name):
            prepare(tmp_path / name, source)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"


def test_an_error_in_the_middle_leaves_nothing(tmp_path, source, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus, "write_shard", full)
    with pytest.raises(ConfigError, match="No space left"):
        prepare(tmp_path / "out", source)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_the_slower_of_two_processes_accepts_the_other_result(tmp_path, source, monkeypatch):
    write = corpus.write_shard

    def overtaken(*arguments):
        monkeypatch.setattr(corpus, "write_shard", write)
        prepare(tmp_path / "out", source)
        return write(*arguments)

    monkeypatch.setattr(corpus, "write_shard", overtaken)
    prepare(tmp_path / "out", source)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 100}, "vocab_size 100"),
        ({"vocab_size": 50_000}, "vocab_size 50000"),
        ({"validation_fraction": 1.0}, "below 1, not 1.0"),
        ({"validation_fraction": 1e-9}, "40 fell to training and 0 to validation"),
    ],
)
def test_settings_that_cannot_work(tmp_path, source, settings, message):
    with pytest.raises(ConfigError, match=message):
        prepare(tmp_path / "out", source, **settings)
    assert not (tmp_path / "out").exists()


def test_one_file_without_validation(tmp_path, source):
    prepare(tmp_path / "out", f"{source}/00.py", validation_fraction=0, vocab_size=285)
    assert IndexedDataset(tmp_path / "out" / "train").num_sequences == 1
    assert not (tmp_path / "out" / "validation.idx").exists()


def test_ensure_default(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(corpus, "prepare_corpus", made.append)
    folder = tmp_path / "data" / "stdlib"
    ensure_default([str(tmp_path / "train"), str(tmp_path / "validation")])  # another folder
    ensure_default([str(folder / "train"), str(tmp_path / "other" / "validation")])
    ensure_default([str(folder / "train"), str(folder / "mine")])
    ensure_default([])
    assert made == []
    ensure_default([str(folder / "train"), str(folder / "validation")])
    monkeypatch.chdir(tmp_path / "data" if (tmp_path / "data").exists() else tmp_path)
    ensure_default(["data/stdlib/train", "data/stdlib/validation"])
    assert [str(path) for path in made] == [str(folder), "data/stdlib"]
    folder.mkdir(parents=True)
    for name in ("train.idx", "validation.idx"):
        (folder / name).touch()
    ensure_default([str(folder / "train"), str(folder / "validation")])
    assert len(made) == 2


def test_command(tmp_path, source, capsys):
    out = str(tmp_path / "out")
    run = ["run", "--output", out, "--source", source, "--vocab_size", str(VOCAB), "--validation_fraction", "0.2"]
    assert main(run) == 0
    assert "unigram entropy" in capsys.readouterr().out
    assert main(["inspect", f"{out}/train"]) == 0
    assert '"vocab_size": 300' in capsys.readouterr().out
    with open(f"{out}/train.bin", "r+b") as file:
        file.write(b"\xff\x00")
    assert main(["inspect", f"{out}/train"]) == 2
    assert "train.bin is not the file" in capsys.readouterr().err
    assert main(["inspect", f"{out}/absent"]) == 2
    assert main(["run", "--output", out, "--source", str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err.count("error: ") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_leaves_nothing_under_the_final_name(tmp_path, source, number):
    program = (
        "import sys, time\nfrom titan_like.prepare import corpus, main\n"
        "def write_shard(*_):\n    print('writing', flush=True)\n    time.sleep(60)\n"
        "corpus.write_shard = write_shard\nsys.exit(main.main())"
    )
    command = [sys.executable, "-c", program, "run", "--output", str(tmp_path / "out"), "--source", source]
    command += ["--vocab_size", str(VOCAB), "--validation_fraction", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.stdout.readline() not in ("writing\n", ""):
            pass
        os.kill(process.pid, number)
        code = process.wait(timeout=20)
    assert code == (143 if number == signal.SIGTERM else -9)
    left = {p.name for p in tmp_path.iterdir()} - {"source"}
    assert left == set() if number == signal.SIGTERM else all(name.startswith(".out.") for name in left)


def test_torch_is_not_imported():
    program = (
        "import sys\nimport titan_like.prepare.main, titan_like.data.dataset, titan_like.data.tokenizer\n"
        "sys.exit('torch' in sys.modules)"
    )
    start = time.perf_counter()
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 0
    assert time.perf_counter() - start < 10
