"""A run under SIGKILL: Redis, the API, a trainer and environments are killed at random and are started again, as a
container engine does it. At the end the test looks for every group.

The seed fixes which process is killed when. The interleaving of the processes depends on the machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from redis.asyncio import Redis
from tests.support.api_server import ApiServer
from tests.support.ledger import Ledger
from tests.support.redis_server import RedisServer
from tests.support.scripted_run import ENV, GROUP_SIZE, GROUPS_PER_STEP, plan
from tests.support.scripted_trainer import Checkpoint

from gristmill import Client
from gristmill.archive.trained import TRAINED_FOLDER
from gristmill_api.store import keys

ROOT = Path(__file__).resolve().parents[2]
RUN = "run-1"
STEPS = 1_000_000
"""More steps than any loop reaches, so the run is still open when the loop ends."""
ENVS = ("env-1", "env-2")
STUCK_S = 120
LINGER_S = 0.15
EVERYONE = ("redis", "api", "trainer", *ENVS)


@dataclass(frozen=True)
class Outcome:
    ledger: Ledger
    seed: int
    seconds: float
    kills: dict[str, int]
    ended_by_themselves: list[str]
    """The last output of scripts that ended unexpectedly. No script may end so while Redis keeps its promise."""

    def text(self) -> str:
        return f"seed {self.seed}, {self.seconds:.0f} s; kills: {self.kills}; groups: {self.ledger.counts()}"


class KillLoop:
    """A stack of real processes on loopback, and the code that kills them."""

    def __init__(
        self,
        *,
        rounds: int,
        seed: int,
        groups_per_step: int = GROUPS_PER_STEP,
        victims: Sequence[str] = EVERYONE,
        redis: Sequence[str] = (),
        runs_dir: Path | None = None,
        drop_every: int = 0,
        api: Mapping[str, str] | None = None,
    ) -> None:
        """`victims`: names in EVERYONE; `redis`: options of redis-server. `runs_dir`: where the API archives, and the
        trainer writes its records. `drop_every`: environments drop one of N rows. `api`: variables of the API."""
        self._rounds = rounds
        self._groups_per_step = groups_per_step
        self._seed = seed
        self._victims = list(victims)
        self._directory = tempfile.TemporaryDirectory(prefix="gristmill-kills-")
        self._folder = Path(self._directory.name)
        self._redis = RedisServer(*redis)
        self._runs_dir = runs_dir
        archive = {} if runs_dir is None else {"GRISTMILL_RUNS_DIR": str(runs_dir)}
        self._api = ApiServer(self._redis.url, **archive, **(api or {}))
        self._checkpoint = self._folder / "checkpoint.json"
        at = (self._api.url, RUN)
        records = "" if runs_dir is None else str(runs_dir / RUN / TRAINED_FOLDER)
        steps = (str(STEPS), str(groups_per_step), str(LINGER_S), records)
        trainer = Script(self._folder / "trainer.log", "trainer", *at, str(self._checkpoint), *steps)
        self._scripts = {"trainer": trainer}
        self._records = [self._folder / name for name in ENVS]
        for record in self._records:
            self._scripts[record.name] = Script(
                record.with_suffix(".log"), "env", *at, record.name, str(record), str(drop_every)
            )
        self._parts: dict[str, RedisServer | ApiServer | Script] = {
            "redis": self._redis,
            "api": self._api,
            **self._scripts,
        }

    def run(self) -> Outcome:
        rng = random.Random(self._seed)
        kills: Counter[str] = Counter()
        ended: list[str] = []
        self._redis.start()
        self._api.start()
        asyncio.run(self._create_run())
        for script in self._scripts.values():
            script.start()
        started = time.monotonic()
        for _ in range(self._rounds):
            ended += self._wait_for_progress()
            # At any time between one checkpoint and the next, whatever the machine's speed is now.
            since = time.monotonic()
            ended += self._wait_for_progress()
            time.sleep(rng.uniform(0, 1.5) * (time.monotonic() - since))
            # Now and then several at once, up to all of them, like a machine that is switched off.
            count = rng.choice([1, 1, 1, 1, 2, len(self._victims)])
            victims = rng.sample(self._victims, min(count, len(self._victims)))
            for name in victims:
                self._parts[name].kill()
            kills.update(victims)
            time.sleep(rng.choice([0, 0, 0.3]))
            for name in rng.sample(victims, len(victims)):
                self._parts[name].start()
        ended += self._wait_for_progress()
        seconds = time.monotonic() - started
        for script in self._scripts.values():
            script.kill()
        return Outcome(asyncio.run(self._settle()), self._seed, seconds, dict(kills), ended)

    def _wait_for_progress(self) -> list[str]:
        """Waits until a new group was acknowledged and a new checkpoint was written. It starts the killed processes
        again, and also scripts that ended unexpectedly meanwhile. Returns the last output of those scripts."""
        ended: list[str] = []
        checkpoint, acknowledged = self._progress()
        deadline = time.monotonic() + STUCK_S
        while True:
            now = self._progress()
            if now[0] > checkpoint and now[1] > acknowledged:
                return ended
            for name, script in self._scripts.items():
                if script.has_ended:
                    ended.append(f"{name}: {script.last_words()}")
                    script.start()
            if time.monotonic() > deadline:
                words = [f"{name}: {script.last_words()}" for name, script in self._scripts.items()]
                raise AssertionError("\n".join([f"no progress for {STUCK_S} s", *words, self._api.log()[-4000:]]))
            time.sleep(0.02)

    def _progress(self) -> tuple[int, int]:
        """Returns when the newest checkpoint was written, and how much was acknowledged, from the files' metadata
        alone."""
        looks = {path: path.stat() for path in (self._checkpoint, *self._records) if path.exists()}
        written = looks[self._checkpoint].st_mtime_ns if self._checkpoint in looks else 0
        return written, sum(look.st_size for path, look in looks.items() if path != self._checkpoint)

    def _acknowledged(self) -> list[str]:
        return [line for path in self._records if path.exists() for line in path.read_text().splitlines()]

    async def _create_run(self) -> None:
        async with Client(self._api.url) as client:
            await client.create_run(RUN, ENV, GROUP_SIZE)

    async def _settle(self) -> Ledger:
        """A last trainer takes the run, as after any kill; then all accounts are compared."""
        checkpoint = Checkpoint.load(self._checkpoint)
        async with Client(self._api.url) as client:
            await client.take(RUN, plan(STEPS, self._groups_per_step), checkpoint.covered, creation=checkpoint.creation)
            if self._runs_dir is not None:
                await self._archived(client)
            return Ledger.of(self._acknowledged(), checkpoint.trained, await client.audit(RUN))

    async def _archived(self, client: Client) -> None:
        """Waits until everything that waits for the disk is there."""
        async with Redis.from_url(self._redis.url) as redis, asyncio.timeout(STUCK_S):
            while (await client.status(RUN)).archiving or await redis.llen(keys.fates(RUN)):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    def __enter__(self) -> KillLoop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for script in self._scripts.values():
            script.kill()
        self._api.kill()
        self._redis.kill()
        self._directory.cleanup()


class Script:
    """Starts tests/support/scripted_<name>.py as a process."""

    def __init__(self, log: Path, name: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", f"tests.support.scripted_{name}", *arguments]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def last_words(self) -> str:
        return self._log.read_text()[-2000:]

    def start(self) -> None:
        # The scripts import this repository's packages as this process does.
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=ROOT, env=environ, stdout=log, stderr=log)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None
