"""`python -m gristmill_model` serves MODEL; `... build [MODEL]` makes it ready and stops there."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from gristmill import GristmillError, Manifest
from gristmill.errors import FileError
from gristmill.internal.logs import line, setup
from gristmill_model import parsers
from gristmill_model.settings import Settings

if TYPE_CHECKING:
    from gristmill_model.resolve import ResolvedModel

log = logging.getLogger("gristmill_model")


def main(argv: list[str] | None = None) -> int:
    """Runs the service. Returns an exit code for `build` and for errors; serving never returns."""
    options = _parser().parse_args(argv)  # before torch, whose import takes seconds
    setup("model")
    import torch
    from transformers.utils import logging as transformers_logging

    from gristmill_model.lora import first_adapter
    from gristmill_model.resolve import resolve
    from gristmill_model.server import exec_vllm

    transformers_logging.disable_progress_bar()  # a hundred lines in a container's log
    try:
        settings = Settings.read(os.environ, torch.cuda.is_available())
        if options.command == "build":
            settings = replace(settings, model=options.model or settings.model)
        elif warning := settings.hosts.warning():
            log.warning(warning)
        resolved = resolve(settings.model, settings.models_dir)
        log.info(line("resolved", model=resolved.requested, revision=resolved.revision, path=resolved.weights_path))
        if options.command == "build":
            return 0
        manifest = describe(resolved, settings)
        log.info(line("parsers", tools=manifest.tool_parser, reasoning=manifest.reasoning_parser))
        manifest.write(settings.models_dir)
        adapter = first_adapter(resolved.weights_path, settings.models_dir) if settings.lora_rank else None
        exec_vllm(settings, manifest, adapter)
    except (GristmillError, OSError) as error:
        reported = FileError.of(error) if isinstance(error, OSError) else error
        print(f"gristmill-model: {reported.report()}", file=sys.stderr)  # noqa: T201 - the one clear line
        return 1


def describe(resolved: ResolvedModel, settings: Settings) -> Manifest:
    """Returns the manifest of a resolved model that is served with `settings`.

    Raises ModelError if `settings` name a parser that vLLM does not have.
    """
    from transformers import AutoConfig

    chosen = parsers.choose(settings, resolved.weights_path)
    config = AutoConfig.from_pretrained(resolved.weights_path, trust_remote_code=False)
    own_limit = getattr(config, "max_position_embeddings", None) or settings.max_length
    return Manifest(
        name=resolved.name,
        requested=resolved.requested,
        revision=resolved.revision,
        tokenizer_path=str(resolved.weights_path),
        weights_path=str(resolved.weights_path),
        serve_path=str(resolved.serve_path),
        sha256=resolved.sha256,
        dtype=settings.dtype,
        max_model_len=min(own_limit, settings.max_length),
        lora_rank=settings.lora_rank,
        sleep=settings.sleep,
        tool_parser=chosen.tool,
        reasoning_parser=chosen.reasoning,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gristmill-model", description="Serve the model that MODEL names, with vLLM.")
    commands = parser.add_subparsers(dest="command")
    build = commands.add_parser("build", help="make the model ready without serving it (for image builds and set-up)")
    build.add_argument("model", nargs="?", help="tiny, smollm2, a folder or a hub id; default: MODEL, else tiny")
    return parser


if __name__ == "__main__":
    sys.exit(main())
