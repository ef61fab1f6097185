"""The commands of the launchers, read from --dry-run, and their behavior when a run ends.

The latter is tested with fake versions of gcloud, sbatch, srun and scontrol.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRAIN = ["--", "train", "--config=experiments/smoke.py", "--workdir=runs/a b"]


def launch(script: str, *options: str, path: Path | None = None, code: int = 0) -> str:
    """Runs a launcher that must exit with `code`. Returns stdout, or stderr if `code` is not 0."""
    environment = os.environ | ({"PATH": f"{path}:{os.environ['PATH']}"} if path else {})
    result = subprocess.run(
        [sys.executable, str(ROOT / "launch" / script), *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == code, result.stderr
    return result.stderr if code else result.stdout


UP = ["up", "my-tpu", "--zone=z", "--type=v5p-8", "--wait=0"]


def worker_command(line: str) -> str:
    """Returns the shell command that a printed `gcloud ... ssh` runs on the workers."""
    return next(word for word in shlex.split(line) if word.startswith("--command=")).removeprefix(
        "--command="
    )


def test_dry_run_ends_quietly_when_its_reader_does():
    command = shlex.join([sys.executable, "launch/tpu_vm.py", *UP, "--dry-run", *TRAIN])
    command = f"({command}; echo $? >&2) | (sleep 0; exec 0<&-; sleep 2)"
    result = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert result.stderr.split("\n")[-2:] == ["0", ""] and "Traceback" not in result.stderr


def test_tpu_vm_prints_its_commands_in_order():
    options = ["my-tpu", "--zone=us-east5-a", "--project=p"]
    lines = launch(
        "tpu_vm.py",
        "up",
        *options,
        "--type=v5p-128",
        "--bucket=b",
        "--spot",
        "--delete",
        "--dry-run",
        *TRAIN,
    ).splitlines()
    create, archive, scp, install, start, follow, delete = lines
    vm = "gcloud compute tpus tpu-vm"
    assert create == (
        f"{vm} create my-tpu --zone=us-east5-a --project=p --accelerator-type=v5p-128 "
        "--version=v2-alpha-tpuv5 --spot"
    )
    assert (
        archive.startswith(f"git -C {ROOT} archive")
        and scp.startswith(f"{vm} scp")
        and scp.endswith(
            "scp --zone=us-east5-a --project=p /tmp/transformer.tar.gz my-tpu: --worker=all"
        )
    )
    assert (
        "--worker=all" in install
        and "--constraint constraints.txt" in install
        and "gcsfuse" in install
        and " b runs" in install
    )
    assert (
        "--worker=all" in start
        and "-m transformer train --config=experiments/smoke.py" in start
        and "runs/a b" in start
    )
    assert "--worker=0" in follow and "run.code" in follow
    assert delete == f"{vm} delete my-tpu --zone=us-east5-a --project=p --quiet"
    for verb in ("stop", "status", "delete", "install", "follow"):
        assert "my-tpu" in launch("tpu_vm.py", verb, *options, "--dry-run")


def test_tpu_vm_restarts_after_preemption_and_not_after_an_error(fake_tool, tmp_path):
    """The run exits with 143 twice, and the TPU is preempted once. The third attempt succeeds."""
    script = f"""
log={tmp_path}/log; echo "$@" >> $log
case "$*" in
  *describe*) [ $(grep -c ' create ' $log) -eq 0 ] && echo NOT_FOUND >&2 && exit 1
    [ $(grep -c 'run.code.*exit' $log) -eq 1 ] && [ $(grep -c ' create ' $log) -eq 1 ] &&
      echo PREEMPTED || echo READY;;
  *run.code*exit*) n=$(grep -c 'run.code.*exit' $log); [ $n -ge 3 ] && exit 0; exit 143;;
esac
"""
    path = fake_tool("gcloud", script)
    options = ["up", "t", "--zone=z", "--type=v4-8", "--wait=0"]
    launch("tpu_vm.py", *options, *TRAIN, path=path)
    log = (tmp_path / "log").read_text()
    assert (
        log.count(" create ") == 2 and log.count(" delete ") == 1
    )  # the preempted TPU is replaced
    assert log.count("setsid") == 3
    path = fake_tool(
        "gcloud", f'echo "$@" >> {tmp_path}/log2\ncase "$*" in *run.code*exit*) exit 2;; esac\n'
    )
    launch("tpu_vm.py", *options, *TRAIN, path=path, code=2)
    assert (tmp_path / "log2").read_text().count("setsid") == 1


def test_follow_ends_when_the_run_has_ended(tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "run.log").write_text("step 1\n")
    (tmp_path / "transformer" / "run.code").write_text("7\n")
    command = worker_command(launch("tpu_vm.py", "follow", "my-tpu", "--zone=z", "--dry-run"))
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (result.returncode, result.stdout) == (7, "step 1\n")


def test_stop_spares_the_shell_that_writes_the_exit_code():
    options = ["my-tpu", "--zone=z", "--dry-run"]
    stop = shlex.split(worker_command(launch("tpu_vm.py", "stop", *options)))
    start = shlex.split(worker_command(launch("tpu_vm.py", "start", *options, *TRAIN)))
    shell = start[start.index("sh") :]
    pattern = stop[stop.index("-f") + 1]
    assert shell[2].startswith(".venv/bin/python -m transformer train")
    assert re.search(pattern, shell[2]) and not re.search(pattern, " ".join(shell))


def test_tpu_vm_leaves_no_archive_behind(fake_tool, tmp_path):
    path = fake_tool(
        "gcloud",
        'case "$*" in *" scp "*) for word; do [ -s "$word" ] && '
        f'echo "$word" > {tmp_path}/sent; done;; esac; exit 0',
    )
    launch("tpu_vm.py", "install", "my-tpu", "--zone=z", path=path)
    archive = Path((tmp_path / "sent").read_text().strip())
    assert (
        archive.name == "transformer.tar.gz"
        and not archive.exists()
        and not (ROOT / archive.name).exists()
    )


@pytest.mark.parametrize(
    ("said", "tried"),
    [
        ("The required property [project] is not currently set.", 1),
        ('"code": 8, "message": "Quota limit \'TPUs\' has been exceeded. Limit: 0 in zone z"', 1),
        ('"code": 8, "message": "There is no more capacity in the zone"', 3),
        ("RESOURCE_EXHAUSTED", 3),
    ],
)
def test_tpu_vm_retries_only_if_capacity_is_missing(fake_tool, tmp_path, said, tried):
    path = fake_tool(
        "gcloud",
        f'case "$*" in *create*) echo x >> {tmp_path}/log; echo {shlex.quote(said)} >&2;; '
        "*) echo NOT_FOUND >&2;; esac; "
        "exit 1",
    )
    errors = launch(
        "tpu_vm.py", *UP, "--restarts=2", *TRAIN, path=path, code=2 if tried == 1 else 1
    )
    assert (tmp_path / "log").read_text().count("x") == tried == errors.count(said)
    assert "stays up" not in errors and errors.count("restarting") == tried - 1


@pytest.mark.parametrize(
    ("code", "delete", "stays"),
    [(0, [], True), (2, [], True), (2, ["--delete"], True), (0, ["--delete"], False)],
)
def test_tpu_that_stays_up_is_reported_last(fake_tool, code, delete, stays):
    path = fake_tool("gcloud", f'case "$*" in *run.code*exit*) exit {code};; esac')
    result = subprocess.run(
        [sys.executable, "launch/tpu_vm.py", *UP, "--project=p", *delete, *TRAIN],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == code
    reminder = (
        "launch: my-tpu stays up and is billed; delete it: "
        "python launch/tpu_vm.py delete my-tpu --zone=z --project=p\n"
    )
    assert (
        result.stdout.endswith(reminder) == stays
        and (" delete my-tpu" in result.stdout.removesuffix(reminder)) != stays
    )


def test_up_reuses_an_existing_tpu(fake_tool, tmp_path):
    """A repeated `up`, for example after a mistake was fixed, uses the existing TPU."""
    path = fake_tool(
        "gcloud", f'echo "$@" >> {tmp_path}/log; case "$*" in *describe*) echo READY;; esac'
    )
    launch("tpu_vm.py", *UP, *TRAIN, path=path)
    assert (
        " create " not in (log := (tmp_path / "log").read_text())
        and " delete " not in log
        and "setsid" in log
    )


def test_up_refuses_an_existing_tpu_of_another_type(fake_tool, tmp_path):
    script = (
        f'echo "$@" >> {tmp_path}/log; case "$*" in *describe*) printf "READY\\t$KIND\\n";; esac'
    )
    path = fake_tool("gcloud", "KIND=v5p-8\n" + script)
    launch("tpu_vm.py", *UP, *TRAIN, path=path)
    (tmp_path / "log").unlink()
    fake_tool("gcloud", "KIND=projects/p/v5p-64\n" + script)
    errors = launch("tpu_vm.py", *UP, *TRAIN, path=path, code=2)
    assert "launch: --type: my-tpu exists and is 1 x v5p-64, not 1 x v5p-8; delete it" in errors
    assert (tmp_path / "log").read_text().count("\n") == 1


def test_failed_installation_is_not_repeated(tmp_path):
    """The steps run in a shell in which one program is missing."""
    command = worker_command(launch("tpu_vm.py", "install", "my-tpu", "--zone=z", "--dry-run"))
    result = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, check=False)
    assert result.returncode == 2 and b"tar" in result.stderr


def test_up_does_not_restart_a_run_after_stop(fake_tool, tmp_path):
    """The workers are a folder here. `stop` is called while `up` waits for the run."""
    (tmp_path / "transformer").mkdir()
    shell = f"""
for word; do case "$word" in --command=*) command=${{word#--command=}};; esac; done
cd {tmp_path}; echo x >> {tmp_path}/log
case "$command" in
  *tar*|*nohup*) ;;
  *"tail -n"*) {{ sleep 0.5; touch transformer/run.stopped; echo 143 > transformer/run.code; }} &
    bash -c "$command";;
esac
"""
    path = fake_tool("gcloud", shell)
    launch("tpu_vm.py", *UP, "--restarts=2", *TRAIN, path=path, code=130)
    stop = worker_command(launch("tpu_vm.py", "stop", "my-tpu", "--zone=z", "--dry-run"))
    start = worker_command(launch("tpu_vm.py", "start", "t", "--zone=z", "--dry-run", *TRAIN))
    assert "touch transformer/run.stopped" in stop and "rm -f run.code run.stopped" in start


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """The module files, for a new repository with a committed experiment that imports a module."""
    monkeypatch.syspath_prepend(str(ROOT / "launch"))
    import files

    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.py").write_text("import sizes\n")
    (tmp_path / "experiments" / "sizes.py").write_text("SIZE = 3\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "start"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(files, "ROOT", tmp_path)
    return files


def test_uncommitted_changes_are_reported(repository, tmp_path, capsys):
    assert repository.uncommitted() == []
    for i in range(7):
        (tmp_path / f"{i}.py").touch()
    repository.check_files(["train", "--config=experiments/mine.py"], repository.uncommitted())
    assert "not copied: 0.py, 1.py, 2.py, 3.py, 4.py, and 2 more\n" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["mine.py", "sizes.py"])
def test_experiment_that_is_not_committed_raises(repository, tmp_path, capsys, file):
    """The archive holds the last commit, so the run would read the file's old version, or none."""
    (tmp_path / "experiments" / file).write_text("import sizes\nSIZE = 4\n")
    with pytest.raises(SystemExit) as error:
        repository.check_files(["train", "--config=experiments/mine.py"], repository.uncommitted())
    assert error.value.code == 2
    assert f"--config: experiments/{file} has changes that are not" in capsys.readouterr().err


def test_text_of_this_machine_raises(repository, tmp_path, capsys):
    (tmp_path / "text.txt").touch()
    (tmp_path / "experiments" / "mine.py").write_text(f"TRAIN = {str(tmp_path / 'text.txt')!r}\n")
    for option in ("--config=experiments/mine.py", "--config.data.train=text.txt"):
        with pytest.raises(SystemExit):
            repository.check_files(["train", option], [])
        assert "is a path of this machine; copy it to a bucket" in capsys.readouterr().err
    repository.check_files(["train", "--config.data.train=gs://b/text.txt"], [])
    assert not capsys.readouterr().err


def test_variables_and_options_of_gcloud(fake_tool, tmp_path, monkeypatch):
    """Secrets are copied in a file that only their owner can read, and appear in no command."""
    script = f"""
for word in "$@"; do case $word in *.env) cp -p $word {tmp_path}/copied;; esac; done
echo "$@" >> {tmp_path}/log
case "$*" in *describe*) echo NOT_FOUND >&2; exit 1;; *run.code*exit*) exit 0;; esac
"""
    monkeypatch.setenv("WANDB_API_KEY", "the secret")
    options = ["--env=WANDB_API_KEY", "--env=LEVEL=2", "--ssh=--tunnel-through-iap", "--bucket=b"]
    options += ["--create=--network=vpc", "--create=--internal-ips"]
    out = launch("tpu_vm.py", *UP, *options, *TRAIN, path=fake_tool("gcloud", script))
    assert (tmp_path / "copied").read_text() == (
        "export WANDB_API_KEY='the secret'\nexport LEVEL=2\n"
    )
    assert (tmp_path / "copied").stat().st_mode & 0o077 == 0
    log = (tmp_path / "log").read_text()
    assert "the secret" not in out + log
    words = (" create ", " scp ", "uv pip install", "setsid")
    create, scp, install, start = (
        next(line for line in log.splitlines() if word in line) for word in words
    )
    assert "--network=vpc --internal-ips" in create and "tunnel" not in create
    assert all("--tunnel-through-iap" in line for line in (scp, install, start))
    assert (
        ". ../transformer.env; .venv/bin/python" in start and "cp run.log runs/logs/my-tpu" in start
    )
    assert "is not set here" in launch("tpu_vm.py", *UP, "--env=ABSENT_", *TRAIN, code=2)


GKE = ["n", "--cluster=c", "--image=i", "--storage=runs"]

MACHINES = [  # name in `plan`, gcloud's accelerator type, xpk's type
    ("v5e-16", "v5litepod-16", "v5litepod-4x4"),
    ("v5litepod-16", "v5litepod-16", "v5litepod-4x4"),
    ("v5p:4x4x4", "v5p-128", "v5p-4x4x4"),
    ("v5p-128", "v5p-128", "v5p-4x4x4"),
    ("v5p:4x4x12", "v5p-384", "v5p-4x4x12"),
    ("v6e:2x4", "v6e-8", "v6e-2x4"),
    ("v4-8", "v4-8", "v4-2x2x1"),
    ("tpu7x-128", None, "tpu7x-4x4x4"),
]


@pytest.mark.parametrize(("text", "product", "kind"), MACHINES)
def test_machine_names_match_those_of_plan(text, product, kind):
    if product:
        assert f" --accelerator-type={product} " in launch(
            "tpu_vm.py", "create", "n", "--zone=z", f"--type={text}", "--dry-run"
        )
    printed = launch("gke.py", *GKE, f"--topology={text}", "--dry-run", *TRAIN)
    assert f" --tpu-type={kind} " in printed
    assert ("--no-use-parallel-containers" in printed) == kind.startswith("tpu7x")


def test_launchers_need_only_the_standard_library():
    """They run with the standard library alone."""
    command = ["launch/gke.py", *GKE, "--topology=v5e-16", "--dry-run", *TRAIN]
    result = subprocess.run(
        [sys.executable, "-E", "-S", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "v5litepod-4x4" in result.stdout, result.stderr


def test_launchers_accept_every_verb(capsys):
    from transformer.cli import main

    assert main(["?"]) == 2
    for verb in capsys.readouterr().err.partition("choose from: ")[2].strip().split(", "):
        launch("local.py", "--dry-run", "--", verb)


V5P = "--topology=v5p-128"
