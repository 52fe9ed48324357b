"""A publisher announces what is served. In the background it uses the weights of its start, and loses no error."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from tests.support.errors import raises
from tests.unit.trainer.lifecycle.conftest import StandInTransport

from gristmill import GristmillError, PolicyVersion
from gristmill_trainer.errors import PublishError
from gristmill_trainer.publish.publisher import Publisher, Tensors
from gristmill_trainer.stop import StoppedError, StopRequest


class _Slow(StandInTransport):
    """Publishes when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.seen: list[tuple[float, PolicyVersion]] = []
        self.error: Exception | None = None

    def publish(self, tensors: Tensors, version: PolicyVersion) -> None:
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        self.seen.append((float(tensors["w"][0]), version))


def test_background_publisher_copies_the_weights_and_the_trainer_continues() -> None:
    slow, told = _Slow(), list[PolicyVersion]()
    publisher = Publisher(slow, told.append, StopRequest(50.0), background=True)
    weights = torch.ones(3)
    publisher.publish({"w": weights}, PolicyVersion(1, 1))
    weights.fill_(7.0)
    assert told == []
    slow.go.set()
    publisher.publish({"w": weights}, PolicyVersion(1, 2))
    publisher.wait()
    assert slow.seen == [(1.0, PolicyVersion(1, 1)), (7.0, PolicyVersion(1, 2))]
    assert told == [PolicyVersion(1, 1), PolicyVersion(1, 2)]


def test_publisher_announces_a_version_before_publish_returns() -> None:
    slow, told = _Slow(), list[PolicyVersion]()
    slow.go.set()
    publisher = Publisher(slow, told.append, StopRequest(50.0))
    publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 1))
    assert told == [version for _, version in slow.seen] == [PolicyVersion(1, 1)]
    assert not publisher.publishing
    slow.error = PublishError("model_server_refused", "no")
    with raises(PublishError, "model_server_refused"):
        publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 2))
    assert told == [PolicyVersion(1, 1)]


def test_background_publisher_raises_an_error_once_and_reports_no_version() -> None:
    slow, told = _Slow(), list[PolicyVersion]()
    slow.error = PublishError("model_server_refused", "no")
    slow.go.set()
    publisher = Publisher(slow, told.append, StopRequest(50.0), background=True)
    publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 1))
    with raises(PublishError, "model_server_refused") as raised:
        publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 2))
    assert raised.value is slow.error
    assert told == []
    publisher.wait()


def test_background_publisher_raises_unexpected_errors_and_reports_no_version() -> None:
    """An error as from a full disk. Without a report, the run would end with its old weights on the server."""
    slow, told = _Slow(), list[PolicyVersion]()
    slow.error = OSError(28, "No space left on device")
    slow.go.set()
    publisher = Publisher(slow, told.append, StopRequest(50.0), background=True)
    publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 1))
    with raises(GristmillError, "unexpected_error", what="publishing version 1.1", error="OSError") as raised:
        publisher.wait()
    assert raised.value.__cause__ is slow.error
    assert told == []


def test_background_publication_ends_before_the_process() -> None:
    """A publication that is cut off between pause and resume would leave the model server paused."""
    slow, told = _Slow(), list[PolicyVersion]()
    publisher = Publisher(slow, told.append, StopRequest(50.0), background=True)
    publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 1))
    signal.raise_signal(signal.SIGTERM)
    threading.Timer(0.2, slow.go.set).start()
    publisher.close()
    assert told == [PolicyVersion(1, 1)]


def test_close_waits_no_longer_than_the_grace_period() -> None:
    slow, told = _Slow(), list[PolicyVersion]()
    publisher = Publisher(slow, told.append, StopRequest(0.1), background=True)
    publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 1))
    signal.raise_signal(signal.SIGTERM)
    publisher.close()
    assert told == []
    slow.go.set()


def test_stop_request_ends_the_wait_for_the_previous_publication() -> None:
    slow = _Slow()
    publisher = Publisher(slow, list[PolicyVersion]().append, StopRequest(50.0), background=True)
    publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 1))
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(StoppedError):
        publisher.publish({"w": torch.ones(1)}, PolicyVersion(1, 2))
    slow.go.set()
