"""A small real tokenizer, a model server that only fails, and processes without torch."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
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


Answer = tuple[int, Any]


class FailingServer:
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
        failing = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                posted = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if (self.command, self.path) == ("GET", "/inference/v1/generate"):
                    self._send(*((405, "Method Not Allowed") if failing.takes_tokens else (404, "Not Found")))
                    return
                failing.asked.append(self.path)
                if posted:
                    failing.now.body = json.loads(posted)
                    failing.bodies.append(failing.now.body)
                    time.sleep(failing.delay)
                self._send(*failing.answers.get(self.path, lambda: (404, {"detail": "Not Found"}))())

            def _send(self, status: int, body: Any) -> None:
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                for name, value in failing.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # A test's client may have stopped waiting.
                    self.wfile.write(raw)

            do_GET = _answer  # noqa: N815
            do_POST = _answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(address, Handler)
        self.url = f"http://{address[0]}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


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
