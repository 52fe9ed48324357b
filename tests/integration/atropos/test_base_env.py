"""atroposlib's own BaseEnv, unchanged, feeds our API. A trainer that behaves like Atropos' example trainer draws
batches."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.atropos.stock_trainer import StockTrainer
from tests.support.api_server import ApiServer
from tests.support.atropos_reference import PYTHON

GROUP_SIZE, BATCH, STEPS = 4, 16, 6
WORKERS = 4
"""The number of groups that base_env.py may be sending at one time."""
KILLS = (1, 3)
"""Steps after which the API is killed."""


@pytest.fixture
def api(redis_url: str) -> Iterator[ApiServer]:
    with socket.create_server(("127.0.0.1", 0)) as door, ApiServer(redis_url, None, door) as server:
        yield server


class EnvProcess:
    def __init__(self, url: str, folder: Path) -> None:
        command = [
            str(PYTHON),
            str(Path(__file__).with_name("base_env.py")),
            url,
            str(STEPS),
            str(GROUP_SIZE),
            str(folder),
        ]
        self._log = folder / "env.log"
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out)

    def ended(self, timeout: float) -> str:
        """Returns the printed output. The process must have exited successfully."""
        assert self._process.wait(timeout) == 0, self.log()[-4000:]
        return self.log()

    def log(self) -> str:
        return self._log.read_text()

    def __enter__(self) -> EnvProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def numbers(batch: list[dict[str, list[list[int]]]]) -> list[int]:
    """Returns the numbers that base_env.py gave the groups."""
    return [group["tokens"][0][0] for group in batch]


@pytest.mark.long
def test_base_env_registers_fills_batches_and_stops_at_total_steps(api: ApiServer, tmp_path: Path) -> None:
    trainer = StockTrainer(api.url, BATCH, STEPS)
    trainer.register()
    with EnvProcess(api.url, tmp_path) as env:
        drawn = [number for _ in range(STEPS + 1) for number in numbers(trainer.draw())]
        assert "stopped at step" in env.ended(60)
    assert len(set(drawn)) == len(drawn) == (STEPS + 1) * BATCH // GROUP_SIZE
    assert trainer.status()["current_step"] == STEPS + 1
    trainer.close()


@pytest.mark.long
def test_base_env_continues_across_kills_and_restarts_of_the_api(api: ApiServer, tmp_path: Path) -> None:
    trainer = StockTrainer(api.url, BATCH, STEPS)
    trainer.register()
    drawn: list[tuple[int, ...]] = []
    with EnvProcess(api.url, tmp_path) as env:
        for step in range(STEPS + 1):
            drawn.append(tuple(numbers(trainer.draw())))
            # Counts each group that was delivered completely, before and after the kill.
            assert trainer.status()["current_step"] == step + 1
            if step in KILLS:
                api.kill()
                api.start()
                assert trainer.status()["current_step"] == step + 1
        assert "stopped at step" in env.ended(60)
    assert len(set(drawn)) == len(drawn), "a batch that was delivered whole came again"
    # If the kill swallowed the answer, BaseEnv sends the group again; the protocol has no ids to recognize it by.
    again = sum(map(len, drawn)) - len({number for batch in drawn for number in batch})
    assert again <= len(KILLS) * WORKERS
    trainer.close()
