"""Model servers of a Slurm job. The node lists are in Slurm's format; the test does not use scontrol."""

from __future__ import annotations

import logging

import pytest
from pydantic import SecretStr
from tests.support.errors import raises

from gristmill import ConfigError
from gristmill_env.run_settings import RunSettings
from gristmill_env.settings.servers import ServerConfig
from gristmill_env.slurm import discover, expand_nodes

NODE_LISTS = [
    ("gpu5", ["gpu5"]),
    ("login,gpu5", ["login", "gpu5"]),
    ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
    ("node[8-11]", ["node8", "node9", "node10", "node11"]),
    ("node[08-11]", ["node08", "node09", "node10", "node11"]),
    ("node[098-101]", ["node098", "node099", "node100", "node101"]),
    ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ("c[1-2]-ib,d[3]", ["c1-ib", "c2-ib", "d3"]),
    ("ip-10-0-[1,12]-7", ["ip-10-0-1-7", "ip-10-0-12-7"]),
    ("[1-2]", ["1", "2"]),
    ("n[1-2].cluster.example", ["n1.cluster.example", "n2.cluster.example"]),
]


@pytest.mark.parametrize(("listed", "names"), NODE_LISTS)
def test_slurm_node_list_is_expanded_to_names(listed: str, names: list[str]) -> None:
    assert expand_nodes(listed) == names


@pytest.mark.parametrize(
    "listed",
    ["", " ", ",a", "a,", "a,,b", "a[", "a]", "a[]", "a[1-]", "a[-1]", "a[3-1]", "a[x-y]", "a[1-3]]", "a[[1]]",
     "a[1-9999999]", "a[1-999]b[1-999]"],
)  # fmt: skip
def test_invalid_slurm_node_list_is_reported(listed: str) -> None:
    with raises(ConfigError, "not_a_node_list", value=listed):
        expand_nodes(listed)


JOB = {"SLURM_JOB_NODELIST": "gpu[1-3]", "NUM_TRAINING_NODES": "1"}
CONFIGURED = [ServerConfig(base_url="http://here:1", timeout=7, api_key=SecretStr("secret"))]


def found(**changes: str) -> list[str]:
    return [server.base_url for server in discover(CONFIGURED, JOB | changes)]


def test_slurm_nodes_after_the_training_nodes_run_servers() -> None:
    assert found() == [f"http://gpu{node}:{port}" for node in (2, 3) for port in range(9000, 9008)]
    assert found(INFER_TP="4") == [f"http://gpu{node}:{port}" for node in (2, 3) for port in (9000, 9001)]
    assert found(INFER_TP="8", NUM_TRAINING_NODES="2") == ["http://gpu3:9000"]
    assert found(INFER_TP="3", NUM_TRAINING_NODES="0")[:3] == [
        "http://gpu1:9000", "http://gpu1:9001", "http://gpu2:9000"
    ]  # fmt: skip
    assert {(server.timeout, server.api_key) for server in discover(CONFIGURED, JOB)} == {(7.0, SecretStr("secret"))}


@pytest.mark.parametrize(
    ("environ", "quoted"),
    [({}, ("http://here:1",)), ({"SLURM_JOB_NODELIST": "gpu1"}, ("gpu1", "http://here:1"))],
)
def test_base_url_is_used_if_slurm_has_no_servers(
    environ: dict[str, str], quoted: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert discover(CONFIGURED, environ) == CONFIGURED
    assert [(record.levelname, record.args) for record in caplog.records] == [("WARNING", quoted)]


@pytest.mark.parametrize(
    ("variable", "value", "bounds"),
    [
        ("NUM_TRAINING_NODES", "3", (0, 2)),
        ("NUM_TRAINING_NODES", "two", (0, 2)),
        ("INFER_TP", "0", (1, 8)),
        ("INFER_TP", "16", (1, 8)),
    ],
)
def test_invalid_slurm_variables_are_reported(variable: str, value: str, bounds: tuple[int, int]) -> None:
    at_least, at_most = bounds
    with raises(ConfigError, "number_out_of_range", variable=variable, value=value, at_least=at_least, at_most=at_most):
        found(**{variable: value})


def test_number_of_training_nodes_must_be_set() -> None:
    with raises(ConfigError, "variable_unset", variable="NUM_TRAINING_NODES"):
        found(NUM_TRAINING_NODES="")


def test_command_uses_slurm_servers_only_with_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with_flag = RunSettings.read(["--slurm", "--timeout", "9"], JOB, "test").config
    assert [server.base_url for server in with_flag.server_configs][:2] == ["http://gpu2:9000", "http://gpu2:9001"]
    assert {server.timeout for server in with_flag.server_configs} == {9.0}
    assert (16, "gpu2, gpu3") in [record.args for record in caplog.records]
    assert len(RunSettings.read([], JOB, "test").config.server_configs) == 1
