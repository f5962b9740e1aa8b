"""A fast circuit and an anchor as two plain processes, with weights and gradients that a test can compute itself.

The test's own process holds no sockets and forks both, so that what one of them closes is closed.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

from hf_meshadapt.anchor.anchor_link import AnchorLink
from hf_meshadapt.anchor.circuit import AnchorCircuit
from hf_meshadapt.anchor.connection import LinkOptions
from hf_meshadapt.anchor.fast_link import FastLink, Source, listen
from hf_meshadapt.anchor.handshake import checked_secret
from hf_meshadapt.anchor.schedule import NO_VERSION, AnchorHistory, AnchorSchedule, agree
from hf_meshadapt.anchor.snapshot import SnapshotEncoder

HOST = "127.0.0.1"
SECRET = "a secret of the tests"
DEADLINE_SECONDS = 40.0  # the machine may be busy
TIMES = dict(
    heartbeat_seconds=0.2, silence_seconds=3.0, handshake_seconds=3.0, retry_seconds=0.05, reconnect_seconds=20.0
)
STEP_SECONDS = 0.002
ANCHOR_EVERY = 2


def weights_at(step: int, stage: int, size: int) -> dict[str, torch.Tensor]:
    """Exact in bfloat16 and as differences at 8 bits: small whole numbers."""
    return {f"layers.{stage}.weight": torch.full((size,), float(step % 64 + stage))}


def gradients(weights: dict[str, torch.Tensor], batch: int) -> dict[str, torch.Tensor]:
    return {name: 2 * tensor for name, tensor in weights.items()}


class Fast:
    """The fast circuit: every stage's link in one process, so that its agreements need no collective."""

    def __init__(self, ports: list[int], size: int, num_slices: int, deterministic: bool, options: dict):
        self.schedule, self.history = AnchorSchedule(ANCHOR_EVERY, deterministic), AnchorHistory()
        places = [(stage, index) for stage in range(len(ports) // num_slices) for index in range(num_slices)]
        sources = tuple(Source(*place, "", port) for place, port in zip(places, ports))
        self.size = size
        self.links = [
            FastLink(
                listen(HOST, source.port),
                source,
                sources if source is sources[0] else (),
                checked_secret(SECRET),
                SnapshotEncoder(source.stage, index=source.slice, num_slices=num_slices, exact=deterministic),
                LinkOptions(**TIMES | options),
            )
            for source in sources
        ]
        self.held = {link.source.stage: {} for link in self.links}
        for link in self.links:
            link.start()
        if deterministic:
            for link in self.links:
                link.wait_until_ready(DEADLINE_SECONDS)

    def step(self, step: int) -> None:
        version = self.due(step) if self.schedule.deterministic else self.agreed()
        if version != NO_VERSION:
            self.history.applied(version)
        self.history.stepped(step, live=self.schedule.is_live(step, self.history.applied_version))
        if self.schedule.snapshot_due(step, self.history.last_version, [link.ready for link in self.links]):
            self.history.took_snapshot(step)
            for link in self.links:
                link.offer(step, weights_at(step, link.source.stage, self.size))
        time.sleep(STEP_SECONDS)

    def agreed(self) -> int:
        for link in self.links:
            while (prior := link.poll()) is not None:
                self.check(prior, link.source.stage)
                self.held[link.source.stage][prior.fields["version"]] = prior
        return agree([list(held) for held in self.held.values()], self.history.applied_version)

    def due(self, step: int) -> int:
        version = self.schedule.due_version(step)
        if version != NO_VERSION:
            for link in self.links:
                self.check(link.wait_for_prior(version, DEADLINE_SECONDS), link.source.stage)
        return version

    def check(self, prior, stage: int) -> None:
        expected = gradients(weights_at(prior.fields["version"], stage, self.size), 0)
        assert prior.tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(prior.tensors[name], tensor, atol=0.3, rtol=0)

    def progress(self, step: int) -> dict:
        return {
            "step": step,
            "pid": os.getpid(),
            "process_group": os.getpgid(0),
            "peer_pid": self.links[0].peer_pid,
            "generations": [link.generation for link in self.links],
            "connected": [link.connected for link in self.links],
            "sent_bytes": sum(link.sent_bytes for link in self.links),
            "num_batches": self.links[0].num_batches,
            "num_refused": sum(link.num_refused for link in self.links),
            "failures": [str(link.failure) for link in self.links if link.failure],
            **self.history.state_dict(),
        }


def fast(folder: Path, ports: list[int], size: int, num_slices: int, deterministic: bool, options: dict) -> None:
    """Steps until the file `stop` appears; writes `progress.json` as it goes."""
    circuit = Fast(ports, size, num_slices, deterministic, options)
    for step in itertools.count():
        circuit.step(step)
        write_json(folder / "progress.json", circuit.progress(step))
        if (folder / "stop").exists():
            break
    for link in circuit.links:
        link.close(timeout_seconds=5.0)


def anchor(folder: Path, port: int, secret: str, pass_seconds: float, options: dict) -> None:
    """An anchor in a process group of its own, as a separate launch has."""
    os.setsid()

    def slow_gradients(weights, batch):
        time.sleep(pass_seconds)
        return gradients(weights, batch)

    link = AnchorLink(HOST, port, checked_secret(secret), LinkOptions(**TIMES | options))
    link.start()
    try:
        link.wait_for_sources(DEADLINE_SECONDS)
        batches = itertools.count(link.num_batches)
        circuit = AnchorCircuit(link, slow_gradients, batches, lambda tensors: tensors, num_batches=link.num_batches)
        circuit.run()
    finally:
        link.close(timeout_seconds=5.0)


def write_json(path: Path, value) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(value))
    partial.replace(path)


def _entry(function, log: Path, args) -> None:
    logging.basicConfig(filename=log, level=logging.INFO, force=True)
    torch.set_num_threads(1)
    gc.freeze()
    code = 0
    try:
        function(*args)
    except BaseException:
        logging.exception("ended by an error")
        code = 1
    logging.shutdown()
    os._exit(code)  # without the parent's handlers


class Circuits:
    """Both circuits of a test, seen from outside."""

    def __init__(self, folder: Path, ports: list[int]):
        self.folder, self.ports = folder, ports
        self.processes = []

    def start(self, function, name: str, *args):
        process = multiprocessing.get_context("fork").Process(
            target=_entry, args=(function, self.folder / f"{name}.log", (self.folder, *args))
        )
        process.start()
        self.processes.append(process)
        return process

    def start_fast(self, size: int = 500, num_slices: int = 1, deterministic: bool = False, **options):
        return self.start(fast, "fast", self.ports, size, num_slices, deterministic, options)

    def start_anchor(self, pass_seconds: float = 0.0, secret: str = SECRET, **options):
        name = f"anchor{len(self.processes)}"
        return self.start(anchor, name, self.ports[0], secret, pass_seconds, options)

    def progress(self) -> dict:
        path = self.folder / "progress.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def logs(self) -> str:
        return "\n".join(f"--- {path.stem}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def wait(self, reached: Callable[[dict], bool], what: str) -> dict:
        """The progress once it satisfies a condition."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not ((progress := self.progress()) and reached(progress)):
            assert time.monotonic() < deadline, f"waited for {what}: {progress}\n{self.logs()}"
            time.sleep(0.01)
        return progress

    def wait_for_priors(self, count: int) -> dict:
        """Waits for so many more priors to be applied."""
        before = self.progress().get("num_applied", 0)
        return self.wait(lambda now: now["num_applied"] >= before + count, f"{count} priors")

    def stop(self, process, *, code: int = 0) -> None:
        process.join(DEADLINE_SECONDS)
        assert process.exitcode == code, f"exit code {process.exitcode}\n{self.logs()}"

    def finish(self) -> dict:
        """Ends the fast circuit; it must end by itself and without an error."""
        (self.folder / "stop").touch()
        self.stop(self.processes[0])
        progress = self.progress()
        assert not progress["failures"], progress
        return progress


@contextmanager
def circuits(folder: Path, ports: list[int]):
    """Kills what a failed test leaves."""
    both = Circuits(folder, ports)
    try:
        yield both
    finally:
        for process in both.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
