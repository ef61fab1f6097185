"""The variables, barriers, data and launcher of processes, tested in one process."""

import time
import types

import numpy as np
import pytest
from test_processes import local

from transformer.config import MeshConfig
from transformer.errors import UserError
from transformer.parallel import processes
from transformer.parallel.mesh import make_mesh
from transformer.parallel.sharding import Share


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"TRANSFORMER_COORDINATOR": "host:1"},
            "TRANSFORMER_PROCESSES: '' is not valid; set .* together",
        ),
        (
            {"TRANSFORMER_COORDINATOR": "host", "TRANSFORMER_PROCESSES": "2",
             "TRANSFORMER_PROCESS": "0"},
            "TRANSFORMER_COORDINATOR: 'host' is not host:port",
        ),
        (
            {"TRANSFORMER_COORDINATOR": "h:1", "TRANSFORMER_PROCESSES": "2",
             "TRANSFORMER_PROCESS": "2"},
            "TRANSFORMER_PROCESS: 2, but there are 2",
        ),
        (
            {"TRANSFORMER_COORDINATOR": "h:1", "TRANSFORMER_PROCESSES": "two",
             "TRANSFORMER_PROCESS": "0"},
            "TRANSFORMER_PROCESSES: 'two'",
        ),
        (
            {"TRANSFORMER_COORDINATOR": "h:65535", "TRANSFORMER_PROCESSES": "2",
             "TRANSFORMER_PROCESS": "0"},
            "a port below 65535",
        ),
        (
            {"TRANSFORMER_COORDINATOR": "h:1", "TRANSFORMER_PROCESSES": "2",
             "TRANSFORMER_PROCESS": "0", "TRANSFORMER_WAIT": "abc"},
            "TRANSFORMER_WAIT: 'abc' is not a number",
        ),
    ],
)  # fmt: skip
def test_invalid_environment_variables_raise(monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        processes.start_processes()


@pytest.mark.parametrize(("wait", "beginning"), [(0.5, "waited 0 s for"), (60, "cannot wait for")])
def test_barrier_error_states_how_long_it_waited(monkeypatch, wait, beginning):
    def wait_at_barrier(name, milliseconds):
        time.sleep(milliseconds / 1000 if wait < 1 else 0)
        raise RuntimeError("one is gone")

    service = types.SimpleNamespace(wait_at_barrier=wait_at_barrier)
    monkeypatch.setattr(processes, "_service", lambda: service)
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    with pytest.raises(
        UserError, match=f"^{beginning} the other processes at 'data': one is gone$"
    ):
        processes.barrier("data", wait)


def test_single_process_has_the_whole_batch():
    for sizes in ({"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"data": 1, "context": 8}):
        share = Share(make_mesh(MeshConfig(**sizes)))
        np.testing.assert_array_equal(share.sequences(16), np.arange(16))


def test_launcher_dry_run_prints_its_commands(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.py").touch()
    assert (
        local.main(
            [
                "--processes=2",
                "--devices=4",
                "--port=9999",
                "--dry-run",
                "--",
                "train",
                "--config=a b.py",
            ]
        )
        == 0
    )
    first, second = capsys.readouterr().out.splitlines()
    assert "TRANSFORMER_PROCESS=0" in first and "TRANSFORMER_PROCESS=1" in second
    assert (
        "TRANSFORMER_COORDINATOR=localhost:9999" in first
        and "device_count=4" in first
        and "-m transformer train '--config=a b.py' &" in first
    )
