"""The quickstart's task as a stock environment of Atropos', written with atroposlib alone. Runs in .venv-atropos:

python sums_env.py serve --env.data FILE.jsonl --env.rollout_server_url http://127.0.0.1:8000 ...
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from pathlib import Path
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from openai import AsyncOpenAI
from pydantic import Field


class SumsConfig(BaseEnvConfig):  # type: ignore[misc]  # its package is not in this environment
    data: str = Field(default="", description="Lines of JSON: question, and an answer that ends in #### and a number")
    send_logprobs: bool = Field(default=True, description="Send what the server said of its tokens")
    as_agent: bool = Field(default=False, description="Play each rollout with OpenAI's client, in two turns")


class Sums(BaseEnv):  # type: ignore[misc]
    name = "sums"
    env_config_cls = SumsConfig

    @classmethod
    def config_init(cls) -> tuple[SumsConfig, list[Any]]:
        config = SumsConfig(
            group_size=8, max_num_workers=16, max_token_length=128, use_wandb=False, steps_per_eval=0,
            ensure_scores_are_not_same=False, max_batches_offpolicy=1, wandb_name="sums",
        )  # fmt: skip
        return config, [APIServerConfig(model_name="tiny", api_key="none", server_type="vllm")]

    async def setup(self) -> None:
        self.rows = itertools.cycle(read(self.config.data))

    async def get_next_item(self) -> dict[str, str]:
        return next(self.rows)

    async def collect_trajectories(self, item: dict[str, str]) -> tuple[dict[str, Any], list[Any]]:
        if self.config.as_agent:
            played = await asyncio.gather(*(self._agent(item["question"]) for _ in range(self.config.group_size)))
            nodes = [node for rollout in played for node in rollout]
        else:
            nodes = await self._replies(item["question"])
        wanted = item["answer"].rpartition("####")[2].strip()
        group: dict[str, Any] = {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "scores": [score(self.tokenizer.decode(node.tokens), wanted) for node in nodes],
        }
        if self.config.send_logprobs:
            group["inference_logprobs"] = [node.logprobs for node in nodes]
        return group, []

    async def _replies(self, question: str) -> list[Any]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(
                messages=[{"role": "user", "content": question}],
                n=self.config.group_size,
                max_tokens=24,
                temperature=1.0,
            )
            # A session of the proxy has its nodes there.
            state = await managed.fetch_state() if hasattr(managed, "fetch_state") else managed.get_state()
            return list(state["nodes"])

    async def _agent(self, question: str) -> list[Any]:
        """Plays a rollout as a program elsewhere does, which knows only the URL of its session at the proxy."""
        async with self.server.managed_server() as managed:
            messages: list[Any] = [{"role": "user", "content": question}]
            async with AsyncOpenAI(base_url=managed.get_url(), api_key="none") as client:
                for _ in range(2):
                    answer = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=24)
                    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                    messages.append({"role": "user", "content": question})
            return list((await managed.fetch_state())["nodes"])

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass


def read(file: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def score(text: str, wanted: str) -> float:
    """Returns 0.2 for an answer in its tags, and 0.8 for the right answer."""
    found = re.findall(r"<answer>\s*(\S.*?)\s*</answer>", text)
    return 0.2 * bool(found) + 0.8 * (found[-1:] == [wanted])


if __name__ == "__main__":
    Sums.cli()
