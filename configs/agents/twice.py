"""An agent of two requests: it asks the task's question, and asks once more for the answer in the same conversation."""

from openai import AsyncOpenAI

# Rollouts share the connections: a client of its own for each rollout would cost more than the model's replies.
CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="of the rollout")


async def run(task, endpoint):
    """Returns the mean reward of both replies: 0.2 for an answer in its tags, and 0.8 for the right answer."""
    client = CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.key)
    right = task.answer.rpartition("####")[2].strip()
    messages, rewards = list(task.messages), []
    for question in ("Once more: " + task.prompt, None):
        answer = await client.chat.completions.create(model=endpoint.model, messages=messages)
        text = answer.choices[0].message.content or ""
        said = text.rpartition("<answer>")[2].partition("</answer>")
        rewards.append(0.2 * bool(said[1]) + 0.8 * (said[0].strip() == right and bool(said[1])))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
    return sum(rewards) / len(rewards)
