"""Real processes, real signals."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading

from megatron_resilience.control.stacks import StackFile, main_thread_waits


def start(stacks: StackFile, body: str) -> subprocess.Popen[bytes]:
    program = f"""
        import time
        from megatron_resilience.control.stacks import write_on_signal
        write_on_signal({stacks.fd})
        def hung_here():
            print("ready", flush=True)
            {body}
        hung_here()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, pass_fds=[stacks.fd]
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


def test_stacks_of_a_looping_and_of_a_stopped_process():
    for stop, body in ((False, "while True: pass"), (True, "while True: pass"), (False, "time.sleep(99)")):
        stacks = StackFile()
        with start(stacks, body) as process:
            try:
                if stop:
                    os.kill(process.pid, signal.SIGSTOP)
                first = asyncio.run(stacks.take(process.pid))
                second = asyncio.run(stacks.take(process.pid))
            finally:
                process.kill()
        assert "hung_here" in first and "hung_here" in second
        assert first.count("most recent call first") == second.count("most recent call first")
        stacks.close()


def test_a_dead_process_has_none():
    stacks = StackFile()
    with start(stacks, "return") as process:
        process.wait()
        assert asyncio.run(stacks.take(process.pid)) == ""
    stacks.close()


def test_what_the_main_thread_does_is_seen_from_another():
    seen = []

    def look() -> None:
        seen.append(main_thread_waits())

    thread = threading.Thread(target=look)
    thread.start()
    while thread.is_alive():
        pass
    assert seen == [False]


def test_a_rank_can_be_looked_at_where_descriptors_have_run_out():
    assert main_thread_waits() is False
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert main_thread_waits() is False
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_looking_keeps_nothing_of_what_it_sees_alive():
    """Locals end with their function, on its thread, however often somebody looks."""
    done, ended_on = threading.Event(), set()

    def look() -> None:
        while not done.is_set():
            main_thread_waits()

    class Local:
        def __del__(self) -> None:
            ended_on.add(threading.get_ident())

    def work() -> None:
        _local = Local()
        for _ in range(50):
            pass

    thread = threading.Thread(target=look)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        for _ in range(20_000):
            work()
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join()
    assert ended_on == {threading.get_ident()}
