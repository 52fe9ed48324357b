"""The environment's metrics for Prometheus, read from the registry after events of a run."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from tests.support.groups import make_group
from tests.support.rollouts import scored_group
from tests.unit.env.tracking.test_observers import rollout_group

from gristmill import Client, PermitSession, PolicyVersion
from gristmill.internal.tracking import ObserverErrors
from gristmill_env.errors import DropReason
from gristmill_env.inference import ModelServers
from gristmill_env.inference.failover import EndpointState
from gristmill_env.progress import Tally
from gristmill_env.prometheus import EnvMetrics, by_label
from gristmill_env.rewards import Score
from gristmill_env.rollouts.groups import RolloutGroup
from gristmill_env.settings.servers import ServerConfig
from gristmill_env.tracking import Observers

pytestmark = pytest.mark.slow

RUN = {"run": "sums"}


class Made:
    """Metrics of an environment with two model servers."""

    def __init__(self, *urls: str) -> None:
        self.registry = CollectorRegistry()
        self.permits = PermitSession(Client("http://127.0.0.1:1"), "sums", "env-1")
        configs = [ServerConfig(base_url=url) for url in urls or ("http://a:1", "http://b:2/v1")]
        self.servers = ModelServers(configs, patience=1)
        self.errors = ObserverErrors()
        self.metrics = EnvMetrics(self.registry, "sums", self.permits, self.servers, self.errors)

    def value(self, name: str, **labels: str) -> float | None:
        """Returns the value of `gristmill_env_NAME`."""
        return self.registry.get_sample_value(f"gristmill_env_{name}", {**RUN, **labels})


@pytest.fixture
async def made() -> Made:
    return Made()


def scored(*totals: float | None, **parts: float | None) -> RolloutGroup:
    return scored_group([Score(total, dict(parts)) for total in totals])


async def test_scored_prompt_counts_its_completions(made: Made) -> None:
    reasons = ["stop", "length", "content_filter\nof anyone", "stop"]
    made.metrics.scored(scored_group([Score(1.0, {})] * 4, [3, 4, 5, None], reasons, 2.0))
    assert made.value("completions_total", finish_reason="stop") == 2
    assert made.value("completions_total", finish_reason="length") == 1
    assert made.value("completions_total", finish_reason="other") == 1, "a server's words are not a label"
    assert made.value("completion_tokens_total") == 12
    assert made.value("prompt_seconds_count") == 1
    assert made.value("prompt_seconds_bucket", le="1.0") == 0
    assert made.value("prompt_seconds_bucket", le="2.5") == 1


async def test_rollouts_that_were_left_out_are_counted(made: Made) -> None:
    assert made.value("failed_rollouts_total") == 0
    for failed in (2, 0, 1):
        made.metrics.scored(scored_group([Score(0.0, {}), Score(1.0, {})], failed=failed))
    assert made.value("failed_rollouts_total") == 3


async def test_sources_of_a_run_have_their_own_means_and_counts(made: Made) -> None:
    made.metrics.scored(scored_group([Score(0.0, {}), Score(1.0, {})], source="sums"))
    made.metrics.scored(scored_group([Score(1.0, {}), Score(1.0, {})], source="words"))
    made.metrics.finished(None, "sums")
    made.metrics.finished(DropReason.SAME_SCORES, "words")
    assert [made.value("source_reward_mean", source=name) for name in ("sums", "words")] == [0.5, 1.0]
    assert made.value("reward_mean") == 0.75
    assert made.value("source_groups_total", source="sums", outcome="submitted") == 1
    assert made.value("source_groups_total", source="words", outcome="dropped") == 1
    assert made.value("source_groups_total", source="words", outcome="submitted") is None


async def test_means_cover_the_last_64_prompts(made: Made) -> None:
    for _ in range(64):
        made.metrics.scored(scored(0.0, 0.0, accuracy=0.0))
    for _ in range(16):
        made.metrics.scored(scored(1.0, 0.0, None, accuracy=1.0))
    assert made.value("reward_mean") == pytest.approx(16 * 0.5 / 64)
    assert made.value("reward_part_mean", reward="accuracy") == pytest.approx(0.25)
    assert made.value("unscored_completions_total") == 16


async def test_reward_without_a_value_has_no_mean(made: Made) -> None:
    made.metrics.scored(scored(None, None, accuracy=None))
    assert made.value("reward_mean") is None
    assert made.value("reward_part_mean", reward="accuracy") is None
    assert made.value("unscored_completions_total") == 2


async def test_names_of_rewards_are_bounded(made: Made) -> None:
    for number in range(500):
        made.metrics.scored(scored(1.0, **{f"part{number}": 1.0}))
    (family,) = [metric for metric in made.registry.collect() if metric.name == "gristmill_env_reward_part_mean"]
    assert len(family.samples) <= 64


async def test_every_outcome_of_a_row_begins_at_zero_and_is_counted(made: Made) -> None:
    for outcome in ("submitted", *DropReason):
        assert made.value("groups_total", outcome=str(outcome)) == 0
    made.metrics.finished(None)
    made.metrics.finished(DropReason.SAME_SCORES)
    made.metrics.finished(DropReason.SAME_SCORES)
    assert made.value("groups_total", outcome="submitted") == 1
    assert made.value("groups_total", outcome="same_scores") == 2


async def test_results_of_an_evaluation_replace_the_results_before(made: Made) -> None:
    made.metrics.evaluation({"pass@1": 0.25, "total": 0.5}, 0)
    made.metrics.evaluation({"pass@1": 0.75}, 20)
    assert made.value("evaluation_result", result="pass@1") == 0.75
    assert made.value("evaluation_result", result="total") is None
    assert made.value("evaluation_step") == 20


async def test_loads_are_read_at_each_scrape(made: Made) -> None:
    slots = made.permits.slots
    slots.places = 5
    slots.begin("g1")
    slots.begin("g2")
    slots.generated("g1")
    assert made.value("policy_step") is None
    made.permits.version = PolicyVersion(2, 17)
    assert made.value("places") == 5
    assert made.value("rows_in_work", stage="generating") == 1
    assert made.value("rows_in_work", stage="scoring") == 1
    assert made.value("policy_step") == 17
    slots.end("g1")
    assert made.value("rows_in_work", stage="scoring") == 0


async def test_metrics_have_state_and_load_of_each_model_server(made: Made) -> None:
    first, second = made.servers.endpoints
    first.state = EndpointState.UP
    second.turn = 3
    with first.carrying(100, evaluation=False):
        assert made.value("model_server_requests", server="a:1") == 1
        assert made.value("model_server_outstanding_tokens", server="a:1") == 100
    assert (made.value("model_server_up", server="a:1"), made.value("model_server_up", server="b:2")) == (1, 0)
    assert made.value("model_server_outages_total", server="b:2") == 3


async def test_label_of_a_model_server_has_no_password_and_is_unique() -> None:
    made = Made("http://user:hunter2-secret@a:1/v1", "http://a:1", "http://a:1/v1")
    assert list(by_label(made.servers.endpoints)) == ["a:1", "a:1#2", "a:1#3"]


async def test_observer_errors_are_counted_by_observer(made: Made) -> None:
    with made.errors.of("W&B"):
        raise RuntimeError("away")
    assert made.value("observer_errors_total", observer="W&B") == 1


async def test_observers_pass_every_event(made: Made) -> None:
    observers = Observers(metrics=lambda errors: made.metrics)
    observers.scored(scored(1.0), 0)
    group = make_group("g00000000", "sums", lengths=[(3, 4)] * 2, rewards=[0.0, 1.0], version="1.0")
    await observers.submitted(group, ["?", "?"], Tally(), rollout_group())
    observers.dropped(DropReason.TIMEOUT)
    observers.evaluation({"pass@1": 1.0}, 4)
    observers.close()
    assert made.value("prompt_seconds_count") == 1
    assert made.value("groups_total", outcome="submitted") == 1
    assert made.value("groups_total", outcome="timeout") == 1
    assert made.value("evaluation_step") == 4


async def test_error_of_the_metrics_is_counted_and_training_continues(made: Made) -> None:
    observers = Observers(metrics=lambda errors: made.metrics)
    observers.scored(scored_group([Score(1.0, {})], seconds="soon"), 0)  # type: ignore[arg-type]
    observers.dropped(DropReason.TIMEOUT)
    assert observers.errors.counts == {"Prometheus": 1}
    assert made.value("groups_total", outcome="timeout") == 1
