"""An agent that adds in two steps: 60 + 7 is 60 + 4 and, in a second request, the model's answer + 3."""

import re

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

# Rollouts share the client, because a client for each rollout would cost more than the model's replies. It keeps no
# free connections: httpx compares all of them with each other for each request.
HTTP = DefaultAsyncHttpxClient(limits=httpx.Limits(max_keepalive_connections=0))
CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="of the rollout", http_client=HTTP)


async def run(task, endpoint):
    """Returns the mean reward of the steps: 0.2 for an answer in its tags, and 0.8 for the right sum.

    Without a number in the first answer the agent sends no second request, and the second step counts as 0.
    """
    client = CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.key)
    total, rest = map(int, re.findall(r"\d+", task.prompt))
    reward = 0.0
    for addend in (rest - rest // 2, rest // 2):
        question = [{"role": "user", "content": f"What is {total} + {addend}?"}]
        answer = await client.chat.completions.create(model=endpoint.model, messages=question)
        found = re.search(r"<answer>\s*(\d{1,3})\s*</answer>", answer.choices[0].message.content or "")
        if found is None:
            break
        reward += 0.1 + 0.4 * (int(found[1]) == total + addend)
        total = int(found[1])
    return reward
