"""Several model servers: each is told by a thread of its own, so that none waits for another."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill import PolicyVersion
from gristmill_trainer.errors import PublishError
from gristmill_trainer.publish.server import ModelServer
from gristmill_trainer.publish.target import PAUSE, OneServer

_LOG = logging.getLogger(__name__)


@dataclass
class _Standing:
    """Where one server is, guarded by `SeveralServers._changed`."""

    target: OneServer
    served: PolicyVersion | None = None
    problem: PublishError | None = None
    """Why its last attempt failed; None while it is served or was not tried yet."""
    away_since: float | None = None


class SeveralServers:
    """Loads every publication into all servers at once.

    A server that is away is tried on and gets the newest weights when it is back; meanwhile the others serve theirs.
    """

    def __init__(self, servers: Sequence[ModelServer], wait_for_all: bool) -> None:
        """`wait_for_all`: `load` returns only when every server has the version, as a synchronous run needs it.
        Otherwise it returns when all that answer have it, and one at least."""
        self._wait_for_all = wait_for_all
        self._standings = [_Standing(OneServer(server)) for server in servers]
        self._wanted: tuple[Path, PolicyVersion] | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._follow, args=(standing,), name=f"publish-{number}", daemon=True)
            for number, standing in enumerate(self._standings)
        ]
        for thread in self._threads:
            thread.start()

    def load(self, path: Path, version: PolicyVersion) -> None:
        """Raises PublishError for a server that refuses, and for one that stays away where it is waited for."""
        with self._changed:
            self._wanted = (path, version)
            self._changed.notify_all()
            while not self._enough(version):
                self._changed.wait(timeout=1.0)  # A request to stop cuts patience short, and notifies nobody.

    def ensure(self, path: Path, version: PolicyVersion) -> None:
        """Look at each server once. One that lost the weights gets them again in the background; nobody waits."""
        for standing in self._standings:
            with self._changed:
                if standing.problem is not None and standing.problem.permanent:
                    raise standing.problem
                if standing.served != version:
                    continue  # Its thread is at it.
            try:
                lost = standing.target.served_version() != str(version)
            except PublishError as error:
                _LOG.info("%s", error)
                lost = True  # Its thread tries until it is back.
            if lost:
                standing.target.tell_restart(version)
                with self._changed:
                    standing.served = None
                    self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads; one that waits for a server's answer is left to the process' end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _enough(self, version: PolicyVersion) -> bool:
        """Under the lock. Raises what no more waiting can cure."""
        now = time.monotonic()
        for standing in self._standings:
            if standing.problem is not None and standing.problem.permanent:
                raise standing.problem
        served = [standing for standing in self._standings if standing.served == version]
        away = [standing for standing in self._standings if standing.problem is not None]
        if len(served) == len(self._standings):
            return True
        if served and not self._wait_for_all:
            return len(served) + len(away) == len(self._standings)
        for standing in away:
            spent = now - (standing.away_since or now)
            if spent > standing.target.server.patience:
                raise PublishError(f"{standing.problem} (tried for {spent:.0f} s)", permanent=True)
        return False

    def _follow(self, standing: _Standing) -> None:
        """Keep one server at the newest version."""
        while True:
            with self._changed:
                while not self._closed and (self._wanted is None or standing.served == self._wanted[1]):
                    self._changed.wait()
                if self._closed or self._wanted is None:
                    return
                path, version = self._wanted
            problem = self._attempt(standing.target, path, version)
            with self._changed:
                if problem is None:
                    standing.served, standing.problem, standing.away_since = version, None, None
                else:
                    if standing.away_since is None:
                        standing.away_since = time.monotonic()
                        _LOG.warning("publishing version %s: %s; trying again", version, problem)
                    standing.problem = problem
                self._changed.notify_all()
                if problem is not None:
                    if problem.permanent:
                        return
                    self._changed.wait_for(lambda: self._closed, timeout=PAUSE)

    @staticmethod
    def _attempt(target: OneServer, path: Path, version: PolicyVersion) -> PublishError | None:
        try:
            target.attempt(path, version)
        except PublishError as error:
            return error
        except Exception as error:  # noqa: BLE001  Raised by `load` and `ensure`: they would wait for ever.
            failure = PublishError(
                f"{target.server.url} took no weights: {type(error).__name__}: {error}", permanent=True
            )
            failure.__cause__ = error
            return failure
        return None
