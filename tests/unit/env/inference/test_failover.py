"""Which server is next, how long a failed server rests, and how often a request may be retried."""

from __future__ import annotations

from collections import Counter

import pytest

from gristmill import SamplingParams
from gristmill_env.errors import InferenceError
from gristmill_env.inference import GenerationRequest, Thinking
from gristmill_env.inference.failover import Endpoint, EndpointState, RetryBudget, choose
from gristmill_env.inference.server import ModelServer
from gristmill_env.settings.servers import ServerConfig

pytestmark = pytest.mark.slow


def endpoint(tokens: int = 0, **changes: float) -> Endpoint:
    made = Endpoint(ModelServer(ServerConfig(), Thinking()), state=EndpointState.UP, tokens=tokens)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_request_cost_is_its_prompt_and_all_tokens_it_may_sample() -> None:
    sampling = SamplingParams(temperature=1.0, max_tokens=50)
    assert GenerationRequest(token_ids=[1] * 10, sampling=sampling, count=4).cost == 210
    assert GenerationRequest(messages=[{"role": "user", "content": "x" * 40}], sampling=sampling).cost == 60


def test_balance_chooses_the_server_with_the_fewest_outstanding_tokens() -> None:
    busy, idle = endpoint(tokens=1000, requests=1), endpoint(tokens=600, requests=30)
    assert choose([busy, idle], 10, evaluation=False) is idle


def test_balance_prefers_the_server_of_the_earlier_turns_unless_it_has_half_as_much_again_to_do() -> None:
    one, other = endpoint(), endpoint()
    other.server = ModelServer(ServerConfig(base_url="http://other:9001"), Thinking())
    later = other.server.url
    for tokens, chosen in [(0, other), (40, other), (50, other), (51, one), (1000, one)]:
        other.tokens = tokens
        assert choose([one, other], 100, evaluation=False, earlier=later) is chosen
    other.tokens, other.state = 0, EndpointState.AWAY
    assert choose([one, other], 100, evaluation=False, earlier=later) is one
    assert choose([one, other], 100, evaluation=False, earlier="http://gone:9001") is one


def test_balance_skips_a_server_that_is_full_or_down() -> None:
    full, away, behind = endpoint(max_requests=2, requests=2), endpoint(), endpoint(tokens=10**6)
    away.state = EndpointState.AWAY
    assert choose([full, away, behind], 10, evaluation=False) is behind
    assert choose([full, away], 10, evaluation=False) is None


def test_evaluations_have_a_separate_request_limit() -> None:
    evaluating = endpoint(requests=4, evaluations=4, max_evaluations=4)
    assert choose([evaluating], 10, evaluation=True) is None
    assert choose([evaluating], 10, evaluation=False) is evaluating


def test_load_is_shared_by_weight() -> None:
    endpoints = [endpoint(weight=1.0), endpoint(weight=3.0)]
    taken: Counter[int] = Counter()
    for _ in range(400):
        chosen = choose(endpoints, 10, evaluation=False)
        assert chosen is not None
        chosen.tokens += 10
        taken[endpoints.index(chosen)] += 1
    assert taken == {0: 100, 1: 300}


def test_balance_counts_a_request_until_it_ends() -> None:
    one = endpoint()

    def fail() -> None:
        with one.carrying(50, evaluation=True):
            assert (one.tokens, one.requests, one.evaluations) == (50, 1, 1)
            raise InferenceError("request_refused", "refused")

    with pytest.raises(InferenceError):
        fail()
    assert (one.tokens, one.requests, one.evaluations) == (0, 0, 0)


def test_retries_are_limited_to_a_share_of_the_requests_and_a_few_per_second() -> None:
    now = 0.0
    budget = RetryBudget(lambda: now)
    assert [budget.retry() for _ in range(100)] == [0.0] * 100  # saved up, so requests leave a dead server at once
    assert [budget.retry() for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    for _ in range(20):
        budget.request()
    assert [budget.retry(), budget.retry()] == pytest.approx([0.0, 0.1])  # 20 requests paid for 4, 3 were owed
    now = 1.0
    assert [budget.retry() for _ in range(9)] == [0.0] * 9
    assert budget.retry() == pytest.approx(0.1)
    now = 1000.0
    assert [budget.retry() for _ in range(101)][-2:] == pytest.approx([0.0, 0.1])  # no more is saved than at first
