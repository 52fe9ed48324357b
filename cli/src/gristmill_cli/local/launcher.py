"""A whole training on this machine, without Docker: Redis, model server, trajectory API, environment, trainer."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from gristmill import ApiError, Deployment, GristmillError, SyncClient
from gristmill.errors import FileError
from gristmill_cli.local.checks import Plan, check, check_store, steps_done
from gristmill_cli.local.local_run import LocalRun, next_commands, saved_step, show_context
from gristmill_cli.local.options import ROOT, read_dotenv, read_options, require_clone
from gristmill_cli.local.output import Output, choose
from gristmill_cli.local.processes import LocalStack, LocalStackError, Service, StopReceived, StopSignals, answers
from gristmill_cli.local.secret_files import SecretsError
from gristmill_cli.local.services import TRAINER_LAST_SECONDS, Services
from gristmill_cli.local.warm_server import MODEL_TIMEOUT
from gristmill_cli.terminal import show_any_text

ARCHIVE_SECONDS = 30.0
"""Maximum seconds that a deletion waits until the API has archived the run's last groups."""


class Launcher:
    """One run on this machine."""

    def __init__(self, services: Services, plan: Plan) -> None:
        self.services = services
        self.plan = plan
        self.folder = services.runs_dir / plan.run_id
        self.output = Output()

    def train(self) -> None:
        """Runs the services until the run is finished, shows the run meanwhile, and prints a summary at the end."""
        options, plan = self.services.options, self.plan
        logs = self.folder / "logs"
        run = LocalRun(
            plan.run_id, plan.training_steps, self.folder, self.services.state / "models", self.services.model_url
        )
        self.output = choose(run, logs, verbose=options.verbose)
        lines: list[Text] = []
        try:
            with self.output, LocalStack(self.output.line, logs, self.output.say, StopSignals()) as stack:
                run.attach(stack)
                try:
                    self._run(stack, run)
                    run.wait_for_report()
                    commands = next_commands(
                        options, ROOT, self.folder, steps=plan.training_steps, question=run.question(),
                        stays=self.services.warm.record() is not None,
                    )  # fmt: skip
                    lines = run.end(commands)
                except StopReceived:
                    self.output.stopping(self._being_finished(stack))
                    raise
                except BaseException:
                    self.output.stopping()
                    raise
                self.output.stopping()
        except LocalStackError as error:
            if not options.verbose:
                show_context(error.values.get("log"))
            if error.code == "service_killed":
                step = saved_step(self.folder)
                start = "from its first step" if step is None else f"from step {step}"
                raise LocalStackError(
                    error.code, f"{error}. The same command continues the run {start}", **error.values, step=step
                ) from error
            raise
        console = Console(highlight=False)
        for line in lines:
            console.print(line, soft_wrap=True)

    def stopped(self) -> str:
        """Returns the last line after a stop signal, when every service has ended."""
        step, name = saved_step(self.folder), self.plan.run_id
        if step is None:
            return f"stopped everything; no step of run {name} is saved yet; the same command continues the run"
        return f"stopped everything; step {step} of run {name} is saved; the same command continues from there"

    def _being_finished(self, stack: LocalStack) -> str:
        """Returns a sentence about the trainer's work after a stop signal."""
        if all(service.name != "trainer" for service in stack.services):
            return "stopping the services"
        return (
            f"stopping: the trainer finishes step {steps_done(self.folder) + 1} if it has the groups of the step and "
            f"needs at most {self.plan.trainer_grace:.0f} s; a third signal kills it"
        )

    def _run(self, stack: LocalStack, run: LocalRun) -> None:
        """Starts the services in order and waits for the end of the run."""
        services = self.services
        services.lock_run(stack, self.plan.run_id)
        services.start_store(stack)
        if services.options.fresh:
            self._discard(stack)
        else:
            check_store(services, self.plan)
        run.connect(services.admin(patience=0))
        services.start_model(stack, self.output.say)
        with services.admin() as api:
            interrupted = api.open_run(wait=0, stack=Deployment.read({**os.environ, **services.environ}).stack)
        grace = self.plan.trainer_grace
        if interrupted is None:
            trainer, env = services.start_trainer(stack, grace), services.start_env(stack)
        else:  # The trainer would take the open run before the environment has extended it, or opened another run.
            env = services.start_env(stack)
            stack.wait_until(env, lambda: env.ready or env.exit_code == 0, MODEL_TIMEOUT)
            trainer = services.start_trainer(stack, grace)
        watch(stack, env, trainer, services.check_model)

    def _discard(self, stack: LocalStack) -> None:
        """Deletes the run from the store, and moves its files to a folder with another name."""
        with self.services.admin() as api:
            try:
                api.close_run(self.plan.run_id)
                _delete(stack, api, self.plan.run_id)
            except ApiError as error:
                if error.code != "run_missing":
                    raise
        folder = self.folder
        if folder.exists():
            names = (folder.with_name(f"{folder.name}.old-{n}") for n in range(1, 10_000))
            apart = next(path for path in names if not path.exists())
            apart.mkdir()
            for path in folder.iterdir():
                if path.name != "logs":  # This start already writes into the logs folder.
                    path.rename(apart / path.name)
            self.output.say(f"the files of the run before are in {apart}")


def close(services: Services, run_id: str) -> None:
    """Ends a run by hand at the API of this machine. Starts the API if it does not answer."""
    with LocalStack(signals=StopSignals()) as stack:
        if not answers(f"{services.api_url}/healthz"):
            services.start_store(stack)
        with services.admin() as api:
            record = api.close_run(run_id)
    print(f"run {run_id} is closed at version {record.version or 'none'}; its folder is {services.runs_dir / run_id}")


def watch(stack: LocalStack, env: Service, trainer: Service, check_model: Callable[[], None] = lambda: None) -> None:
    """Waits until environment and trainer end without error. The first failure of a service ends the run.

    `check_model`: raises the error of a model server that is not a service of the stack. Raises StopReceived after a
    stop signal.
    """
    deadline = None
    while True:
        stack.raise_if_stopped()
        check_model()
        for service in stack.services:
            if service.exit_code or (service.exit_code is not None and service not in (env, trainer)):
                raise service.failure()
        if env.exit_code == 0:
            # The run is finished. The trainer ends with the run, unless the run finished before the trainer started.
            deadline = deadline or time.monotonic() + TRAINER_LAST_SECONDS
            if trainer.exit_code == 0 or time.monotonic() > deadline:
                return
        time.sleep(0.2)


def main(arguments: Sequence[str], prog: str = "gristmill run") -> int:
    """Runs the command line without the command's name. Returns the exit code."""
    show_any_text()
    # Without services, the default action ends the launcher: no service is left behind, and no traceback is printed.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        require_clone("run")
        read_dotenv()
        options = read_options(arguments, prog)
        services = Services(options)
        if options.close:
            try:
                close(services, options.close)
            except StopReceived as stop:
                print(f"stopped everything; run {options.close} may be open still; the same command closes it")
                return 128 + stop.number
            return 0
        if services.secrets is not None:
            services.secrets.close_to_others(services.runs_dir, services.state)
        launcher = Launcher(services, check(services))
        try:
            launcher.train()
        except StopReceived as stop:
            print(launcher.stopped())
            return 128 + stop.number
    except (GristmillError, SecretsError, OSError) as error:
        reported = FileError.of(error) if isinstance(error, OSError) else error
        print(f"error [{reported.code}]: {reported}", file=sys.stderr)
        return 1
    print(
        f"run {launcher.plan.run_id} is finished; metrics, checkpoints, the final model and logs are in "
        f"{launcher.folder}"
    )
    return 0


def _delete(stack: LocalStack, api: SyncClient, run_id: str) -> None:
    deadline = time.monotonic() + ARCHIVE_SECONDS
    while True:
        stack.raise_if_stopped()
        try:
            return api.delete_run(run_id)
        except ApiError as error:
            if error.code != "archiving" or time.monotonic() > deadline:
                raise
            time.sleep(0.5)
