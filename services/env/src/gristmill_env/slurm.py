"""`--slurm`: finds the model servers of a job by the variables that Slurm and its launch script set.

| variable            | meaning                                                                                |
|---------------------|----------------------------------------------------------------------------------------|
| SLURM_JOB_NODELIST  | the job's nodes, e.g. "gpu[01-03,07]"; set by Slurm                                      |
| NUM_TRAINING_NODES  | nodes, from the first, that train; the others run servers; set by the launch script     |
| INFER_TP            | GPUs per server (tensor parallel), 1 when unset; set by the launch script               |

Every other node runs 8 / INFER_TP servers, at the ports 9000, 9001, ... Atropos uses the same rule.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Iterator, Mapping

from gristmill import ConfigError
from gristmill_env.settings.servers import ServerConfig

logger = logging.getLogger(__name__)

_GPUS_A_NODE = 8
_FIRST_PORT = 9000
_MOST_NODES = 65536
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def discover(configured: list[ServerConfig], environ: Mapping[str, str]) -> list[ServerConfig]:
    """Returns the job's servers, each with the settings of the first of `configured`.

    Outside Slurm, and in a job with a single node, returns `configured` and logs a warning.
    Raises ConfigError for variables that make no sense.
    """
    addresses = ", ".join(server.base_url for server in configured)
    listed = environ.get("SLURM_JOB_NODELIST")
    if not listed:
        logger.warning("--slurm: no Slurm job is here; base_url %s is used (SLURM_JOB_NODELIST is not set)", addresses)
        return configured
    nodes = expand_nodes(listed)
    if len(nodes) < 2:
        logger.warning("--slurm: the job has one node, %s, so base_url %s is used", listed, addresses)
        return configured
    training = _number(environ, "NUM_TRAINING_NODES", None, at_most=len(nodes) - 1)
    servers = _GPUS_A_NODE // _number(environ, "INFER_TP", 1, at_least=1, at_most=_GPUS_A_NODE)
    found = [
        configured[0].model_copy(update={"base_url": f"http://{node}:{_FIRST_PORT + number}"})
        for node in nodes[training:]
        for number in range(servers)
    ]
    logger.info("--slurm: %d servers on %s", len(found), ", ".join(nodes[training:]))
    return found


def expand_nodes(listed: str) -> list[str]:
    """Returns the host names of a Slurm node list, as `scontrol show hostnames` does.

    "gpu[01-03,07],login" is gpu01, gpu02, gpu03, gpu07, login; "r[1-2]n[1-2]" is r1n1, r1n2, r2n1, r2n2.

    Raises ConfigError when `listed` is not a valid node list.
    """
    names: list[str] = []
    for pattern in _split(listed):
        choices: list[list[str]] = []
        at = 0
        while at < len(pattern):
            part = _PART.match(pattern, at)
            if part is None:
                raise _no_list(listed)
            choices.append([part[2]] if part[2] else list(_numbers(part[1], listed)))
            at = part.end()
        if math.prod(len(parts) for parts in choices) > _MOST_NODES:
            raise _no_list(listed)
        names += ("".join(parts) for parts in itertools.product(*choices))
    return names


def _split(listed: str) -> list[str]:
    """Splits at the commas outside brackets."""
    patterns = re.findall(r"(?:\[[^\]]*\]|[^,\[])+", listed.strip())
    if not patterns or ",".join(patterns) != listed.strip():
        raise _no_list(listed)
    return [str(pattern) for pattern in patterns]


def _numbers(ranges: str, listed: str) -> Iterator[str]:
    for text in ranges.split(","):
        match = _RANGE.fullmatch(text)
        if match is None:
            raise _no_list(listed)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= _MOST_NODES:
            raise _no_list(listed)
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _no_list(listed: str) -> ConfigError:
    return ConfigError(
        "not_a_node_list",
        f"SLURM_JOB_NODELIST='{listed}' is not a node list such as gpu[01-03,07],login",
        variable="SLURM_JOB_NODELIST",
        value=listed,
    )


def _number(environ: Mapping[str, str], name: str, default: int | None, *, at_least: int = 0, at_most: int) -> int:
    text = environ.get(name)
    if not text:
        if default is not None:
            return default
        raise ConfigError(
            "variable_unset",
            f"--slurm: {name} is not set; export how many of the job's nodes, from the first, do not run model servers",
            variable=name,
        )
    if not text.isdecimal() or not at_least <= int(text) <= at_most:
        raise ConfigError(
            "number_out_of_range",
            f"--slurm: {name}={text} must be a number from {at_least} to {at_most}",
            variable=name,
            value=text,
            at_least=at_least,
            at_most=at_most,
        )
    return int(text)
