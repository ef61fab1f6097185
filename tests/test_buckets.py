"""Mirrors of buckets, and claims in them: real clients, and a server of our own."""

import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_gcs import close_mirrors, gcs, machine  # two are fixtures

from transformer import buckets
from transformer.claims import STALE, Claim, Process
from transformer.cli import main
from transformer.errors import UserError
from transformer.runs.metrics import MetricsLog


def test_both_sides_become_equal(gcs, machine):
    machine("first")
    mirror = buckets.open_folder("gs://bucket/equal/")
    (mirror / "runs").mkdir()
    (mirror / "runs" / "a.json").write_text("1")
    (mirror / "log").write_text("first\n")
    (mirror / "again").write_text("2")
    close_mirrors()
    assert gcs.names("bucket", "equal/") == {"runs/a.json", "log", "again"}
    machine("second")
    mirror = buckets.open_folder("gs://bucket/equal")
    assert (mirror / "log").read_text() == "first\n"
    with (mirror / "log").open("a") as log:
        log.write("second\n")
    buckets.delete(mirror / "runs" / "a.json")
    buckets.delete(mirror / "again")
    (mirror / "again").write_text("3")
    (mirror / "unfinished.tmp").write_text("")
    buckets.sync(mirror)
    assert gcs.names("bucket", "equal/") == {"log", "again"}
    assert gcs.buckets["bucket"]["equal/again"].content == b"3"
    machine("first")
    mirror = buckets.open_folder("gs://bucket/equal")
    assert (mirror / "log").read_text() == "first\nsecond\n"
    assert not (mirror / "runs" / "a.json").exists()


def test_missing_files_are_copied_again(gcs, machine):
    """A cleaner of caches must not delete what is in the bucket."""
    machine("first")
    mirror = buckets.open_folder("gs://bucket/missing")
    for name in ("a", "b"):
        (mirror / name).write_text(name)
    buckets.sync(mirror)
    (mirror / "a").unlink()
    buckets.sync(mirror)
    assert (mirror / "a").read_text() == "a"
    shutil.rmtree(mirror)
    buckets.sync(mirror)
    assert {x.name for x in mirror.iterdir()} == {"a", "b"}
    assert gcs.names("bucket", "missing/") == {"a", "b"}


def test_deleted_folder_leaves_nothing_behind(gcs, machine):
    machine("first")
    mirror = buckets.open_folder("gs://bucket/deleted")
    for name in ("checkpoints/3/commit_success.txt", "samples/3.txt", "log"):
        gcs.write("bucket", f"deleted/{name}", b"")
    buckets.sync(mirror)
    assert {x.name for x in mirror.iterdir()} == {"checkpoints", "samples", "log"}
    for name in gcs.names("bucket", "deleted/"):
        del gcs.buckets["bucket"][f"deleted/{name}"]
    buckets.sync(mirror)
    assert not mirror.exists() or not any(mirror.iterdir())


def test_objects_that_stand_for_folders_are_not_copied(gcs, machine):
    """The console and gcsfuse create them."""
    machine("first")
    for name in ("", "run/", "run//absolute", "run/../outside", "log"):
        gcs.write("bucket", f"folders/{name}", b"")
    mirror = buckets.open_folder("gs://bucket/folders")
    assert [x.name for x in mirror.rglob("*")] == ["log"]


def test_upload_without_an_answer_is_recognized(gcs, machine, capsys):
    """The file is not replaced, because a process may append to it."""
    machine("first")
    mirror = buckets.open_folder("gs://bucket/answer")
    with (mirror / "log").open("a") as log:
        log.write("a\n")
        log.flush()
        gcs.write("bucket", "answer/log", b"a\n")  # what this machine uploaded, unknown to it
        buckets.sync(mirror)
        log.write("b\n")
        log.flush()
        buckets.sync(mirror)
        log.write("c\n")
        log.flush()
        gcs.write("bucket", "answer/log", b"a\nb\n")  # again, and the log has grown since
        buckets.sync(mirror)
        log.write("d\n")
    buckets.sync(mirror)
    assert gcs.buckets["bucket"]["answer/log"].content == b"a\nb\nc\nd\n"
    assert (mirror / "log").read_text() == "a\nb\nc\nd\n"
    me = Process.here(1)
    gcs.write("bucket", "answer/lock", str(me).encode())
    assert Claim(mirror / "lock")._stored.create(me)
    assert not Claim(mirror / "lock")._stored.create(Process.here(2))
    assert not capsys.readouterr().err


def test_log_continues_after_it_was_replaced(gcs, machine):
    machine("first")
    mirror = buckets.open_folder("gs://bucket/replaced")
    log = MetricsLog(mirror, 0, tensorboard=False, wandb="", config={})
    log.write(1, loss=1.0)
    buckets.sync(mirror)
    gcs.write("bucket", "replaced/metrics.jsonl", b'{"step": 1, "loss": 1.0, "x": 2}\n')
    log.write(2, loss=2.0)
    buckets.sync(mirror)
    log.write(3, loss=3.0)
    buckets.sync(mirror)
    lines = gcs.buckets["bucket"]["replaced/metrics.jsonl"].content.decode().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3]


def test_unchanged_files_are_not_transferred(gcs, machine):
    machine("first")
    mirror = buckets.open_folder("gs://bucket/unchanged")
    (mirror / "log").write_text("a")
    buckets.sync(mirror)
    gcs.requests.clear()
    buckets.sync(mirror)
    buckets.sync(mirror.parent / "other")
    assert [request.split()[0] for request in gcs.requests] == ["GET", "GET"]
    assert not any("log" in request for request in gcs.requests)


def test_bucket_version_of_a_conflict_stays(gcs, machine, capsys):
    machine("first")
    mirror = buckets.open_folder("gs://bucket/conflict")
    (mirror / "log").write_text("a")
    buckets.sync(mirror)
    gcs.write("bucket", "conflict/log", b"theirs")
    (mirror / "log").write_text("ours")
    buckets.sync(mirror)
    assert (mirror / "log").read_text() == "theirs"
    assert "gs://bucket/conflict/log: it has changed here and in the" in capsys.readouterr().err


def test_object_written_during_synchronization_is_kept(gcs, machine, monkeypatch):
    machine("first")
    mirror = buckets.open_folder("gs://bucket/meanwhile")
    (mirror / "log").write_text("ours")
    mark = buckets._mark_checkpoints

    def write_meanwhile(mirror, objects):  # after the listing, before the upload
        mark(mirror, objects)
        if not gcs.names("bucket", "meanwhile/"):
            gcs.write("bucket", "meanwhile/log", b"theirs")

    monkeypatch.setattr(buckets, "_mark_checkpoints", write_meanwhile)
    buckets.sync(mirror)
    assert gcs.buckets["bucket"]["meanwhile/log"].content == b"theirs"
    assert (mirror / "log").read_text() == "theirs"


def test_line_appended_during_an_upload_follows_in_the_next(gcs, machine, monkeypatch):
    machine("first")
    mirror = buckets.open_folder("gs://bucket/appended")
    (mirror / "log").write_text("a\n")

    def read_and_append(file):
        content = file.read_bytes()
        with file.open("a") as log:
            log.write("b\n")
        return content

    with monkeypatch.context() as patched:
        patched.setattr(buckets, "read_bytes", read_and_append)
        buckets.sync(mirror)
    assert gcs.buckets["bucket"]["appended/log"].content == b"a\n"
    buckets.sync(mirror)
    assert gcs.buckets["bucket"]["appended/log"].content == b"a\nb\n"


def test_one_machine_holds_a_claim(gcs, machine):
    machine("first")
    file = "gs://bucket/claims/a/lock"
    first = Claim(buckets.open_folder("gs://bucket/claim") / "lock")
    assert first.take() and first.alive()
    assert not first.file.exists(), "a claim is an object from the start"
    machine("second")
    second = Claim(buckets.open_folder("gs://bucket/claim") / "lock")
    assert second.alive() and not second.take()
    second.release()  # has no effect: another machine holds it
    assert second.who().endswith("on first")
    machine("first")
    first.release()
    machine("second")
    assert second.take(), file


def test_one_of_concurrent_processes_creates_a_claim(gcs, machine):
    machine("first")
    file = buckets.open_folder("gs://bucket/concurrent") / "lock"
    with ThreadPoolExecutor(8) as pool:
        create = lambda pid: Claim(file)._stored.create(Process("host", str(pid), ""))
        made = list(pool.map(create, range(8)))
    assert sum(made) == 1
    assert Claim(file).holder().pid == str(made.index(True))


def test_stale_claim_is_taken_by_one_machine(gcs, machine):
    machine("first")
    first = Claim(buckets.open_folder("gs://bucket/stale") / "lock")
    assert first.take()
    first.renew()
    held = gcs.buckets["bucket"]["stale/lock"]
    assert held.generation > 0 and held.content.startswith(b"first ")
    gcs.buckets["bucket"]["stale/lock"] = held._replace(written=time.time() - 2 * STALE)
    holder = first.holder()
    machine("second")
    second = Claim(buckets.open_folder("gs://bucket/stale") / "lock")
    assert second.take()
    machine("third")
    third = Claim(buckets.open_folder("gs://bucket/stale") / "lock")
    assert not third._stored.remove(holder), "the dead claim has been replaced"
    third._stored.renew(holder)  # has no effect, for the same reason
    assert not third.take()
    machine("first")
    with pytest.raises(UserError, match="on second took over this run"):
        first.check()
    first.renew()
    first.release()
    assert gcs.buckets["bucket"]["stale/lock"].content.startswith(b"second ")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("gs://bucket", "gs://bucket: not a folder in a bucket; write gs://BUCKET/FOLDER, "),
        ("gs://bucket/a/../b", "not a folder in a bucket"),
        (
            "gs://bucket/a#1",
            "gs://bucket/a#1: not a folder in a bucket; write gs://",
        ),
        ("gs://another/run", "gs://another/run: no access to the bucket (404"),
        ("s3://bucket/run", "is not a folder; use a local one, or gs://BUCKET/FOLDER"),
    ],
)
def test_bad_folders_take_one_line(gcs, machine, capsys, url, problem):
    machine("first")
    assert main(["evaluate", f"--workdir={url}"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and problem in lines[0]


def test_files_that_cannot_be_uploaded_stay(gcs, machine, capsys):
    """The next command on this machine uploads them."""
    machine("first")
    mirror = buckets.open_folder("gs://bucket/refused")
    (mirror / "log").write_text("a")
    gcs.refuse = "/upload"
    with pytest.raises(UserError, match="gs://bucket/refused: no access to the bucket"):
        close_mirrors()
    gcs.refuse = None
    buckets.open_folder("gs://bucket/refused")
    assert gcs.buckets["bucket"]["refused/log"].content == b"a"


def test_error_of_the_body_is_kept(gcs, machine):
    machine("first")
    mirror = buckets.open_folder("gs://bucket/body")
    (mirror / "log").write_text("a")
    gcs.refuse = "/upload"
    with pytest.raises(ZeroDivisionError), buckets.closing():
        raise ZeroDivisionError
    gcs.refuse = None
    buckets.open_folder("gs://bucket/body")
    assert gcs.names("bucket", "body/") == {"log"}


def test_bucket_errors_name_the_extra(gcs, machine, monkeypatch):
    machine("first")
    monkeypatch.setitem(sys.modules, "google.api_core.exceptions", None)
    with pytest.raises(UserError, match=r"gs:// needs the extra \[gcs\]: pip install"):
        buckets.open_folder("gs://bucket/extra")
