"""An environment on atroposlib's own BaseEnv, with made-up completions. Runs in .venv-atropos:

    python base_env.py API_URL TOTAL_STEPS GROUP_SIZE FOLDER

Every group has a unique number, the first token of its sequences. The group is long enough that it is sent gzipped.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

LENGTH = 300


class Numbered(BaseEnv):  # type: ignore[misc]  # its package is not in this environment
    name = "numbered"

    async def setup(self) -> None:
        self.numbers = itertools.count()

    async def get_next_item(self) -> int:
        return next(self.numbers)

    async def collect_trajectories(self, item: int) -> tuple[dict[str, Any], list[int]]:
        await asyncio.sleep(0.01)
        size = self.config.group_size
        tokens = [[item, index, *range(2, LENGTH)] for index in range(size)]
        group = {
            "tokens": tokens,
            "masks": [[-100] * 2 + row[2:] for row in tokens],
            "scores": [float(index) for index in range(size)],
            "inference_logprobs": [[1.0, 1.0, *(-0.5 for _ in row[2:])] for row in tokens],
            "group_overrides": {},
        }
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass


def main(url: str, total_steps: int, group_size: int, folder: str) -> None:
    words: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")), unk_token="a")
    words.save_pretrained(folder)
    config = BaseEnvConfig(
        group_size=group_size,
        max_num_workers=4,
        tokenizer_name=folder,
        use_wandb=False,
        wandb_name="numbered",
        rollout_server_url=url,
        total_steps=total_steps,
        max_token_length=LENGTH,
        ensure_scores_are_not_same=False,
    )
    server = APIServerConfig(model_name="none", base_url="http://127.0.0.1:9/v1", api_key="none", health_check=False)
    env = Numbered(config, [server])
    asyncio.run(env.env_manager())
    sys.stdout.write(f"stopped at step {env.status_dict['current_step']}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
