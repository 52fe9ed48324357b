"""A small real tokenizer, a model server that only fails, and processes without torch."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import http_server
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def no_torch_in_processes() -> Iterator[None]:
    """Processes that tests start do without torch, as in the image of `env`. Its import would take seconds in each.

    It ends with the module, because `make test-long` runs trainers in the same session.
    """
    folder = str(Path(__file__).parents[2] / "support" / "no_torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and three special tokens, with a ChatML template."""
    from transformers import PreTrainedTokenizerFast  # pytest loads this file before `make quick` hides torch.

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


PassTime = Callable[[float], None]


@pytest.fixture
async def pass_time(monkeypatch: pytest.MonkeyPatch) -> PassTime:
    """Advances the clock of the test's event loop by seconds, from any thread.

    A test with a long time limit decides by it when the limit is over, however slow the machine is.
    """
    loop = asyncio.get_running_loop()
    real, passed = loop.time, 0.0

    def advance(seconds: float) -> None:
        nonlocal passed
        passed += seconds
        loop.call_soon_threadsafe(lambda: None)  # the loop reads its clock again

    monkeypatch.setattr(loop, "time", lambda: real() + passed)
    return advance


Answer = tuple[int, Any]


class FailingServer(http_server.HttpServer):
    """Answers each path as a test prescribes, and never with a completion that could be trained on.

    While `takes_tokens` is set, the server has vLLM's route for token ids.
    """

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        """`address`: host and port; port 0 chooses a free port."""
        self.takes_tokens = True
        self.delay = 0.0
        """Seconds before each answer to a POST."""
        self.bodies: list[Any] = []
        """The bodies of the POST requests, read as JSON."""
        self.now = threading.local()
        """`now.body`: the body of the POST request that is being answered."""
        self.headers: dict[str, str] = {}
        """Sent with every answer."""
        self.answers: dict[str, Callable[[], Answer]] = {
            "/v1/models": lambda: (200, {"data": [{"id": "tiny", "root": "/models/tiny", "max_model_len": 1024}]})
        }
        self.asked: list[str] = []
        super().__init__(self._reply, address)

    def _reply(self, request: http_server.Request) -> http_server.Answer:
        if (request.method, request.path) == ("GET", "/inference/v1/generate"):
            return http_server.Answer(*((405, "Method Not Allowed") if self.takes_tokens else (404, "Not Found")))
        self.asked.append(request.path)
        if request.body:
            self.now.body = request.json
            self.bodies.append(self.now.body)
            time.sleep(self.delay)
        status, body = self.answers.get(request.path, lambda: (404, {"detail": "Not Found"}))()
        return http_server.Answer(status, body, self.headers)


@pytest.fixture
def failing_server() -> Iterator[FailingServer]:
    server = FailingServer()
    yield server
    server.close()


@pytest.fixture
def two_servers() -> Iterator[tuple[FailingServer, FailingServer]]:
    pair = FailingServer(), FailingServer()
    yield pair
    for server in pair:
        server.close()
