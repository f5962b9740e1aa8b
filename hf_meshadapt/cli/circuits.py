"""`meshadapt launch --anchor`: both circuits of a run on this machine, each a launch of its own."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

END_SECONDS = 60.0  # for the anchor to end by itself after the fast circuit
STOP_SECONDS = 30.0
POLL_SECONDS = 0.5
LISTENING_PORTS = (20000, 32000)
MOST_STAGES = 16  # where the script alone knows how many
CPU = {"ACCELERATE_USE_CPU": "true"}  # the launcher's own --cpu would start one process


def fast_options(script_args: list[str]) -> list[str]:
    """Options for both circuits' scripts that are not among those that were given.

    Raises:
        ValueError: the circuit is chosen, which is done here.
    """
    if given(script_args, "circuit") is not None:
        raise ValueError("--circuit with --anchor: both circuits are started. Leave one of the two out")
    added = [] if given(script_args, "anchor") is not None else ["--anchor", "true"]
    if given(script_args, "fast_endpoint") is None:
        stages = given(script_args, "pipeline_stages") or ""
        added += ["--fast_endpoint", f"127.0.0.1:{free_ports(int(stages) if stages.isdecimal() else MOST_STAGES)}"]
    return added


def given(script_args: list[str], name: str) -> str | None:
    """What follows an option of the script, "" where nothing does; None without the option."""
    for index, argument in enumerate(script_args):
        option, equals, value = argument.partition("=")
        if option in (f"--{name}", f"--{name.replace('_', '-')}"):
            return value if equals else next(iter(script_args[index + 1 : index + 2]), "")
    return None


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports of this machine that are free now.

    Below the range from which the kernel takes the ports of outgoing connections (32768 on, RFC 6056 and Linux's
    ip_local_port_range): one of those could be gone before anybody listens.
    """
    for _ in range(100):
        first = random.SystemRandom().randrange(*LISTENING_PORTS)  # whatever seed others have set
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # one of them is taken
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise RuntimeError(f"no {count} neighbouring ports are free. Give --fast_endpoint among the script's arguments")


def refuse_several_machines(config: Path) -> None:
    """Raises ValueError for a launch file of more than one machine."""
    for line in config.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "num_machines" and value.split("#")[0].strip() not in ("", "1"):
            raise ValueError(
                f"--anchor with --config {config}: it is for several machines. Start the anchor as a launch of its own, "
                "with --circuit anchor and --fast_endpoint among the script's arguments"
            )


def shown(command: list[str], changes: dict[str, str]) -> str:
    """A command as one types it."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in changes.items()), shlex.join(command)])


def run_both(fast: list[str], anchor: list[str], changes: list[dict[str, str]]) -> int:
    """Runs the fast circuit's command with the anchor's beside it; returns the fast circuit's exit code.

    The run goes on where the anchor fails, and standard error says so.

    Args:
        changes: variables of both environments, fast and anchor.
    """
    from ..anchor.handshake import SECRET_VARIABLE, new_secret

    environment = {SECRET_VARIABLE: new_secret(), **os.environ}
    # So that both are stopped below.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    processes: list[subprocess.Popen] = []
    try:
        for command, change in zip((fast, anchor), changes):
            processes.append(subprocess.Popen(command, env=environment | change))
        return wait_for_both(*processes)
    finally:
        stop(processes)
        signal.signal(signal.SIGTERM, before)


def wait_for_both(fast: subprocess.Popen, anchor: subprocess.Popen) -> int:
    """The fast circuit's exit code, 128 + n where signal n ended it."""
    code, told = None, False
    while code is None:
        try:
            code = fast.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if not told and anchor.poll():
                told = True
                print(
                    f"The anchor ended with exit code {anchor.returncode}: the run goes on without.", file=sys.stderr
                )
    if code == 0:
        try:
            anchor.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"The anchor still runs {END_SECONDS:g} s after the fast circuit and is stopped.", file=sys.stderr)
    return 128 - code if code < 0 else code


def stop(processes: list[subprocess.Popen]) -> None:
    """Ends what still runs."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
