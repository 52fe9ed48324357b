"""A few random histories, always the same, which most mutants do not survive for long. Only trial.py runs them.

Hypothesis leaves out half of the rules in each history that it makes of a state machine. That finds rare orders in the
long run. Here few histories must find the mutants, so every rule may come at every step.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.integration.api.test_machine import StoreMachine

STEPS = 60


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_few_histories(redis_url: str, data: st.DataObject) -> None:
    machine = type("Machine", (StoreMachine,), {"redis_url": redis_url})()
    try:
        machine.under_way()
        for _ in range(STEPS):
            possible = [rule for rule in machine.rules if all(holds(machine) for holds in rule.preconditions)]
            rule = data.draw(st.sampled_from(possible))
            rule.function(
                machine, **{name: data.draw(strategy) for name, strategy in rule.arguments_strategies.items()}
            )
            for invariant in machine.invariants:
                invariant.function(machine)
    finally:
        machine.teardown()
