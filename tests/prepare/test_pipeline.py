"""The stages as a whole: duplicates, split, shards, resumption, what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import titan_like.prepare as prepare_package
from titan_like.config.errors import ConfigError, TitanError
from titan_like.data.dataset import check_data
from titan_like.data.manifest import Manifest
from titan_like.prepare import ensure_default, pipeline, shards
from titan_like.prepare.main import main
from titan_like.prepare.texts import side_of

LONG = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness"
NEAR = LONG + " of all"


def many(count):
    return [f"document number {i} says {i * i}" for i in range(count)]


def test_exact_duplicates_keep_the_first_whatever_the_tasks(shop):
    path = shop.jsonl("a.jsonl", "cat", "dog", "cat", "cat ", "dog", "bird")
    for task_bytes in (1, 30, 10**6):
        report = shop.run(path, out=f"out{task_bytes}", executor__task_bytes=task_bytes)
        assert shop.texts(out=f"out{task_bytes}") == ["cat", "dog", "cat ", "bird"]
        entry = report["deduplicate and split"]["dropped"]["duplicate"]
        assert (entry["documents"], entry["bytes"]) == (2, 6)
        assert report["deduplicate and split"]["documents_in"] == 6
        assert report["deduplicate and split"]["documents_out"] == 4
    shop.run(path, out="all", dedup__exact=False)
    assert shop.texts(out="all") == ["cat", "dog", "cat", "cat ", "dog", "bird"]


@pytest.mark.parametrize("task_bytes", [40, 10**6])
def test_r030_short_texts_are_no_near_duplicates(shop, task_bytes):
    path = shop.jsonl("a.jsonl", "cat", "dog", "cat", "a b c", NEAR, LONG, LONG + " of all men")
    report = shop.run(path, dedup__near=True, executor__task_bytes=task_bytes)
    assert shop.texts() == ["cat", "dog", "a b c", NEAR]
    dropped = report["deduplicate and split"]["dropped"]
    assert {reason: entry["documents"] for reason, entry in dropped.items()} == {"duplicate": 1, "near-duplicate": 2}


def test_decontamination(shop):
    evaluation = shop.jsonl("eval.jsonl", "What is the colour of the sky on a clear day in June? Answer: blue")
    path = shop.jsonl(
        "a.jsonl",
        "copied: WHAT is the colour, of the sky on a clear day in june?! indeed",  # 13 words in other dress
        "what is the colour of the sky on a clear night in the month of June",
    )
    report = shop.run(path, decontaminate__paths=evaluation)
    assert len(shop.texts()) == 1 and "night" in shop.texts()[0]
    (example,) = report["read and clean"]["dropped"]["evaluation data"]["examples"]
    assert example["document"] == f"{path}:1" and "clear day" in example["text"]
    with pytest.raises(ConfigError, match=r"has 99 words; lower decontaminate\.ngram"):
        shop.run(path, out="x", decontaminate__paths=evaluation, decontaminate__ngram=99)


def test_filters(shop):
    good = "The people of the town have that old custom to meet with the others in the square. " * 4
    good += "Nobody knows when it began and who was the first to be there."
    path = shop.jsonl("a.jsonl", good, "too few words", "x" * 3000)
    report = shop.run(path, clean__filters="gopher_quality", clean__max_characters=2000, clean__min_characters=5)
    assert shop.texts() == [good]
    dropped = report["read and clean"]["dropped"]
    assert {reason: entry["documents"] for reason, entry in dropped.items()} == {"gopher_short_doc": 1, "too long": 1}


def test_the_split_keeps_copies_on_one_side(shop):
    texts = many(400)
    shop.run(shop.jsonl("a.jsonl", *texts), output__validation_fraction=0.1, dedup__exact=False)
    train, validation = shop.texts(), shop.texts("validation")
    assert sorted(train + validation) == sorted(texts)
    assert 18 <= len(validation) <= 62  # 40 +- 3.7 standard deviations
    assert all(side_of(text.upper().replace(" ", "\n"), 0.1) == "validation" for text in validation)
    assert all(side_of(f" {text}\n", 0.1) == "train" for text in train)


@pytest.mark.parametrize("workers", [1, 2])
def test_r032_every_document_is_in_exactly_one_shard(shop, workers):
    texts = many(100)
    path = shop.jsonl("a.jsonl", *texts)
    shop.run(path, output__shards=7, executor__workers=workers, executor__task_bytes=1000)
    found = shop.shards()
    assert [text for shard in found for text in shard] == texts
    assert len(found) == 7 and {len(shard) for shard in found} == {14, 15}
    assert [p.name for p in sorted(shop.out.glob("*.idx"))] == [f"train_{i:05d}.idx" for i in range(7)]
    manifest = Manifest.load(shop.out / "train_00003")
    assert (manifest.shard, manifest.shards) == (3, 7)


def test_r032_fewer_documents_than_shards(shop):
    shop.run(shop.jsonl("a.jsonl", "one", "two"), output__shards=7)
    assert shop.shards() == [["one"], ["two"]]


def test_shards_of_a_size(shop):
    shop.run(shop.jsonl("a.jsonl", *["12345678" + str(i) for i in range(10)]), output__shard_bytes=30)  # 90 bytes
    assert [len(shard) for shard in shop.shards()] == [3, 3, 4]


def test_the_result_does_not_depend_on_the_tasks(shop):
    path = shop.jsonl("a.jsonl", *many(60), *many(20))
    for out, task_bytes in (("a", 10**6), ("b", 100)):
        shop.run(path, out=out, executor__task_bytes=task_bytes, tokenizer__path=None, tokenizer__vocab_size=290)
    for name in ("train.bin", "train.idx", "tokenizer.model"):
        assert (shop.folder / "a" / name).read_bytes() == (shop.folder / "b" / name).read_bytes()


def test_what_is_written_and_its_manifest(shop):
    shop.run(shop.jsonl("a.jsonl", *many(30)), output__validation_fraction=0.2)
    names = [f"{side}.{suffix}" for side in ("train", "validation") for suffix in ("bin", "idx", "manifest.json")]
    assert sorted(p.name for p in shop.out.iterdir()) == sorted([*names, "report.json", "small.model"])
    assert sorted(p.name for p in shop.folder.iterdir()) == ["a.jsonl", "out"]
    manifest = Manifest.load(shop.out / "train")
    assert (manifest.vocab_size, manifest.eod_id, manifest.bos_id, manifest.pad_id) == (300, 2, 1, -1)
    assert manifest.settings["prepare"]["output"]["validation_fraction"] == 0.2
    assert {"python", "numpy", "sentencepiece"} <= set(manifest.versions)
    assert check_data([str(shop.out / "train")], 8, 300, shop.model) == []


def test_what_is_there_and_valid_is_left_alone(shop):
    path = shop.jsonl("a.jsonl", "x", "y")
    shop.run(path)
    before = {p.name: p.stat().st_mtime_ns for p in shop.out.iterdir()}
    shop.lines.clear()
    shop.run(path)
    assert len(shop.lines) == 1 and "there and valid" in shop.lines[0]
    assert {p.name: p.stat().st_mtime_ns for p in shop.out.iterdir()} == before
    with pytest.raises(ConfigError, match=r"output\.bos = False \(asked for: True\); remove it"):
        shop.run(path, output__bos=True)


@pytest.mark.parametrize("name", ["train_00000.bin", "train_00001.idx", "train_00001.manifest.json", "small.model"])
@pytest.mark.parametrize("damage", ["cut", "remove"])
def test_a_damaged_output_is_never_overwritten(shop, name, damage):
    path = shop.jsonl("a.jsonl", "x", "y")
    shop.run(path, output__shards=2)
    content = (shop.out / name).read_bytes()[:-3]
    (shop.out / name).unlink() if damage == "remove" else (shop.out / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"remove it or choose another|prepare the data again"):
        shop.run(path, output__shards=2)
    assert (shop.out / name).exists() == (damage == "cut")


def test_foreign_files_are_never_overwritten(shop):
    path = shop.jsonl("a.jsonl", "x")
    thesis = shop.file("out/thesis.txt", b"x")
    shop.file("file", b"x")
    for out in ("out", "file"):
        with pytest.raises(ConfigError, match=r"no whole preparation|Not a directory"):
            shop.run(path, out=out)
    assert Path(thesis).read_text() == "x"
    (shop.folder / "empty").mkdir()
    shop.run(path, out="empty")  # an empty folder is free


def test_a_run_goes_on_where_it_failed(shop, monkeypatch):
    path = shop.jsonl("a.jsonl", *many(9))
    calls = []
    write = shards.write_shard

    def fails_once(prefix, *rest):
        calls.append(Path(prefix).name)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(prefix, *rest)

    monkeypatch.setattr(pipeline, "write_shard", fails_once)
    with pytest.raises(ConfigError, match="No space left"):
        shop.run(path, output__shards=3)
    assert not shop.out.exists()
    monkeypatch.setattr(pipeline, "filter_steps", lambda config, ledger: [_no_one])
    shop.run(path, output__shards=3)
    assert calls == ["train_00000", "train_00001", "train_00001", "train_00002"]
    assert shop.texts() == many(9)
    assert any("going on" in line for line in shop.lines)


def _no_one(data, rank, world_size):
    raise AssertionError("the cleaning was done and must not be done again")


def test_changed_input_or_settings_begin_anew(shop, monkeypatch):
    path = shop.jsonl("a.jsonl", "one")
    monkeypatch.setattr(pipeline.Finish, "publish", lambda *_: (_ for _ in ()).throw(OSError(5, "stopped")))
    for texts, settings in ((("one",), {}), (("one", "two"), {}), (("one", "two"), {"output__bos": True})):
        path = shop.jsonl("a.jsonl", *texts)
        with pytest.raises(ConfigError, match="stopped"):
            shop.run(path, **settings)
    monkeypatch.undo()
    shop.run(path, output__bos=True)
    assert not [line for line in shop.lines[:-12] if "going on" in line]
    assert shop.texts() == ["one", "two"] and Manifest.load(shop.out / "train").tokens > 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_leaves_no_output_and_can_be_finished(shop, number):
    path = shop.jsonl("a.jsonl", *many(10))
    program = (
        "import sys, time\nfrom titan_like.prepare import pipeline, main\n"
        "def write_shard(*_):\n    print('writing', flush=True)\n    time.sleep(60)\n"
        "pipeline.write_shard = write_shard\nsys.exit(main.main())"
    )
    command = [sys.executable, "-c", program, "run", f"--input.paths={path}", f"--output.folder={shop.out}"]
    command += [f"--tokenizer.path={shop.model}", "--output.validation_fraction=0", "--executor.workers=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.stdout.readline() not in ("writing\n", ""):
            pass
        os.kill(process.pid, number)
        code = process.wait(timeout=30)
    assert code == (143 if number == signal.SIGTERM else -9)
    assert sorted(p.name for p in shop.folder.iterdir()) == [".out.work", "a.jsonl"]
    shop.run(path)
    assert "going on" in shop.lines[0] and shop.texts() == many(10)
    assert sorted(p.name for p in shop.folder.iterdir()) == ["a.jsonl", "out"]


def test_two_processes_prepare_the_same_only_once(shop):
    path = shop.jsonl("a.jsonl", *many(10))
    command = [sys.executable, "-m", "titan_like.prepare.main", "run", f"--input.paths={path}"]
    command += [f"--output.folder={shop.out}", f"--tokenizer.path={shop.model}", "--output.validation_fraction=0"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(process.communicate(timeout=60)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert sum("there and valid" in text for text in said) == 1
    assert shop.texts() == many(10)


def test_an_error_in_a_worker_process_is_one_sentence(shop, capfd):
    path = shop.jsonl("a.jsonl", "good", "oops {", b"bad")
    arguments = ["run", f"--input.paths={path}", f"--output.folder={shop.out}", "--output.validation_fraction=0"]
    arguments += ["--executor.task_bytes=20", "--executor.workers=2"]
    assert main(arguments) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"error: {path}:3: not JSON") and error.count("\n") == 1


def test_slurm_gets_a_chain_of_jobs(shop, monkeypatch):
    log = shop.folder / "submitted"
    fake = shop.file("bin/sbatch", f'#!/bin/sh\necho "$@" >> {log}\necho job $(wc -l < {log})\n'.encode())
    os.chmod(fake, 0o755)
    monkeypatch.setenv("PATH", f"{shop.folder / 'bin'}:{os.environ['PATH']}")
    path = shop.jsonl("a.jsonl", "x")
    settings = {"executor__kind": "slurm", "executor__slurm_partition": "cpu", "executor__workers": 0}
    with pytest.raises(FileNotFoundError):  # no report yet: the jobs write it
        shop.run(path, **settings)
    lines = log.read_text().splitlines()
    assert len(lines) == 12  # six stages, and datatrove's job for the statistics after each
    assert "--dependency=afterok:1" in lines[2] and "--dependency" not in lines[0]
    assert any("submitted to Slurm" in line for line in shop.lines)


def test_the_ray_executor_gets_the_settings(shop):
    from titan_like.prepare.config import load_prepare_config

    config = load_prepare_config(["--executor.kind=ray", "--executor.cpus_per_task=3", "--executor.workers=5"])
    executor = pipeline.make_executor(pipeline.Stage("x", 7, []), str(shop.folder / "logs"), config, None)
    assert type(executor).__name__ == "RayPipelineExecutor"
    assert (executor.tasks, executor.workers, executor.cpus_per_task, executor.mem_per_cpu_gb) == (7, 5, 3, 4)


def test_ensure_default(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(pipeline, "prepare", lambda config: made.append(config.output.folder))
    folder = tmp_path / "data" / "stdlib"
    ensure_default([str(tmp_path / "train"), str(tmp_path / "validation")])  # another folder
    ensure_default([str(folder / "train"), str(tmp_path / "other" / "validation")])
    ensure_default([str(folder / "train"), str(folder / "mine")])
    ensure_default([])
    assert made == []
    ensure_default([str(folder / "train"), str(folder / "validation")])
    monkeypatch.chdir(tmp_path)
    ensure_default(["data/stdlib/train", "data/stdlib/validation"])
    assert made == [str(folder), "data/stdlib"]
    folder.mkdir(parents=True)
    for name in ("train.idx", "validation.idx"):
        (folder / name).touch()
    ensure_default([str(folder / "train"), str(folder / "validation")])
    assert len(made) == 2


def test_the_default_and_the_shipped_config_are_the_same():
    from titan_like.prepare.config import load_prepare_config

    toml = Path(__file__).parents[2] / "train_configs" / "data" / "stdlib.toml"
    shipped = load_prepare_config(["--config", str(toml)])
    assert shipped.identity() == prepare_package.default_config("anywhere").identity()


def test_heavy_packages_are_not_imported_with_the_package():
    program = (
        "import sys, titan_like.prepare, titan_like.prepare.main, titan_like.data.dataset\n"
        "heavy = {'torch', 'datatrove', 'tokenizers', 'tiktoken', 'pyarrow', 'blobfile'} & set(sys.modules)\n"
        "sys.exit(' '.join(heavy) or 0)"
    )
    start = time.perf_counter()
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 0
    assert time.perf_counter() - start < 10


def test_r043_memory_per_document_is_small(shop):
    program = (
        "import re, sys\nfrom pathlib import Path\nfrom titan_like.prepare.config import load_prepare_config\n"
        "from titan_like.prepare.shards import Vocabulary, write_shard\n"
        "model, out, count, size = sys.argv[1:]\n"
        "texts = (('id', 'a' * int(size)) for _ in range(int(count)))\n"
        "write_shard(Path(out), texts, Vocabulary(model, load_prepare_config([])), '', {}, threads=1)\n"
        # Not ru_maxrss, which also counts what the parent held when it forked.
        "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
    )

    def peak(count, size=1):
        command = [sys.executable, "-c", program, shop.model, shop.folder / f"x{count}", str(count), str(size)]
        return int(subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=True).stdout) * 1024

    few, more = peak(40_000), peak(130_000)  # both fill the three batches that may be on their way
    assert more < 400e6 and more - few < 90_000 * 60 + 20e6
    assert json.loads((shop.folder / "x130000.manifest.json").read_text())["documents"] == 130_000
    small, large = (peak(1, size) for size in (6_000_000, 18_000_000))  # a token per byte: the worst case
    assert large - small < 10 * 12e6


def test_a_worker_that_is_killed_ends_the_run(shop, monkeypatch):
    path = shop.jsonl("a.jsonl", *many(10))
    monkeypatch.setattr(pipeline, "filter_steps", lambda config, ledger: [_killed])
    with pytest.raises(TitanError, match="a worker process was killed"):
        shop.run(path, executor__workers=2, executor__task_bytes=200)


def _killed(data, rank, world_size):
    os.kill(os.getpid(), signal.SIGKILL)
    yield from data
