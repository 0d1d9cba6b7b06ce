"""One thread does what is due beside a rank's work, and nothing of it after the block that asked for it."""

from __future__ import annotations

import os
import socket
import threading
import time

from spmdrl.runtime.supervision.agent import Agent, Duty


def wait_for(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_all_duties_are_done_by_one_thread_until_their_blocks_end():
    agent, done = Agent(), {"often": set(), "seldom": set()}
    with agent.doing(Duty(lambda: done["often"].add(threading.get_ident()), 0.01)):
        with agent.doing(Duty(lambda: done["seldom"].add(threading.get_ident()), 0.05)):
            wait_for(lambda: all(done.values()))
        assert done["often"] == done["seldom"] != {threading.get_ident()}
        done["seldom"].clear()
        done["often"].clear()
        wait_for(lambda: done["often"])
        time.sleep(0.15)
    assert not done["seldom"]


def test_a_block_ends_when_its_work_under_way_has_ended():
    agent, begun, ended = Agent(), threading.Event(), []

    def work() -> None:
        begun.set()
        time.sleep(0.1)
        ended.append(True)

    with agent.doing(Duty(work, 0.01)):
        begun.wait(10)
    assert ended


def test_a_descriptor_that_can_be_read_is_not_waited_for_by_the_clock():
    agent, found = Agent(), []
    received, sent = socket.socketpair()
    with received, sent, agent.doing(Duty(lambda: found.append(received.recv(1)), descriptor=received.fileno())):
        sent.send(b"x")
        wait_for(lambda: found)
        time.sleep(0.05)
    assert found == [b"x"]


def test_a_duty_that_raises_is_shown_and_the_others_go_on(capsys):
    agent, done = Agent(), []
    with agent.doing(Duty(lambda: 1 // 0, 0.01)), agent.doing(Duty(lambda: done.append(True), 0.02)):
        wait_for(lambda: len(done) > 3)
    assert capsys.readouterr().err.count("ZeroDivisionError") == 1


def test_a_forked_process_begins_with_no_duty_and_a_thread_of_its_own():
    agent, done = Agent(), []
    with agent.doing(Duty(lambda: done.append(os.getpid()), 0.01)):
        wait_for(lambda: done)
        child = os.fork()
        if child == 0:
            done.clear()
            time.sleep(0.1)
            is_new = not done
            agent.begin(Duty(lambda: done.append(os.getpid()), 0.01))
            time.sleep(1)
            os._exit(0 if is_new and set(done) == {os.getpid()} else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
